"""What a benchmark asks for, by the name of a dataset: sessions of turns, content named or given.

Synthetic content is named as in the simulator's traces, and spelt later: as token ids or as words,
whichever the API takes (`bench_spelling`). Equal names are equal content, so names say what a
prefix cache may find.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.scheduler.simulator.arrivals import SHAREGPT_OUTPUT, SHAREGPT_PROMPT
from paged.scheduler.simulator.trace import Segment
from paged.server.bench_prompt_file import FilePrompt, read_prompts
from paged.server.bench_prompts import random_lengths

type Content = tuple[Segment, ...] | str | Sequence[Mapping[str, Any]]
"""Named segments, a text, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
      content: the prompt; after the first turn of a session, only what is new.
      output_len: most tokens to generate.
      pause: seconds between the end of the turn before and this one.
    """

    content: Content
    output_len: int
    pause: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of named content; of a text nobody knows without its tokenizer: 0."""
        if not isinstance(self.content, tuple):
            return 0
        return sum([count for _, count in self.content])


type Session = Sequence[Turn]
"""Turns that follow each other: each is sent with everything before it, answers included."""


def make_sessions(args: argparse.Namespace, rng: np.random.Generator) -> list[Session]:
    """Return sessions of `args.num_prompts` requests together, of the dataset that `args` names.

    Raises: ValueError for a prompt file that is missing or holds something else; OSError if it
      cannot be read.
    """
    return _DATASETS[args.dataset_name](args, rng)


def _random(args: argparse.Namespace, rng: np.random.Generator) -> list[Session]:
    count, share = args.num_prompts, args.random_range_ratio
    input_lens = random_lengths(rng, count, args.random_input_len, share)
    output_lens = random_lengths(rng, count, args.random_output_len, share)
    prefix: tuple[Segment, ...] = ()
    if args.random_prefix_len:
        prefix = (("prefix", args.random_prefix_len),)
    return [
        [Turn((*prefix, (index, length)), output_len)]
        for index, (length, output_len) in enumerate(zip(input_lens, output_lens, strict=True))
    ]


def _sharegpt(args: argparse.Namespace, rng: np.random.Generator) -> list[Session]:
    """Lengths like ShareGPT's; the texts are random."""
    input_lens = SHAREGPT_PROMPT.draw(rng, args.num_prompts)
    output_lens = SHAREGPT_OUTPUT.draw(rng, args.num_prompts)
    if args.sharegpt_output_len is not None:
        output_lens = [args.sharegpt_output_len] * args.num_prompts
    return [
        [Turn(((index, length),), output_len)]
        for index, (length, output_len) in enumerate(zip(input_lens, output_lens, strict=True))
    ]


def _prefix_repetition(args: argparse.Namespace, rng: np.random.Generator) -> list[Session]:
    """Every prefix with equally many different suffixes, in an order that is shuffled.

    Source: vLLM `benchmarks/datasets`, PrefixRepetitionRandomDataset.
    """
    prefixes = np.arange(args.num_prompts) % args.prefix_repetition_num_prefixes
    if not args.disable_shuffle:
        rng.shuffle(prefixes)
    prefix_len, suffix_len = args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len
    return [
        [
            Turn(
                ((f"prefix-{prefix}", prefix_len), (index, suffix_len)),
                args.prefix_repetition_output_len,
            )
        ]
        for index, prefix in enumerate(prefixes.tolist())
    ]


def _cyclic(args: argparse.Namespace, _rng: np.random.Generator) -> list[Session]:
    """Documents in the same order again and again, a new question about each: LRU's worst case."""
    documents = args.cyclic_num_documents
    return [
        [
            Turn(
                (
                    (f"document-{index % documents}", args.cyclic_document_len),
                    (index, args.cyclic_question_len),
                ),
                args.cyclic_output_len,
            )
        ]
        for index in range(args.num_prompts)
    ]


def _multi_turn(args: argparse.Namespace, rng: np.random.Generator) -> list[Session]:
    """Chats that share a system prompt; the last one may be shorter."""
    sessions: list[Session] = []
    for first in range(0, args.num_prompts, args.multi_turn_num_turns):
        turns = []
        for turn in range(min(args.multi_turn_num_turns, args.num_prompts - first)):
            content: tuple[Segment, ...] = ((first + turn, args.multi_turn_user_len),)
            if turn == 0 and args.multi_turn_system_len:
                content = (("system", args.multi_turn_system_len), *content)
            pause = float(rng.exponential(args.multi_turn_think_time)) if turn else 0.0
            turns.append(Turn(content, args.multi_turn_output_len, pause))
        sessions.append(turns)
    return sessions


def _custom(args: argparse.Namespace, rng: np.random.Generator) -> list[Session]:
    """The prompts of a file, shuffled, and from the start again if there are too few."""
    if args.dataset_path is None:
        raise ValueError("--dataset-name custom needs the file of its prompts: --dataset-path.")
    prompts = read_prompts(args.dataset_path, args.custom_output_len)
    order = np.arange(len(prompts)) if args.disable_shuffle else rng.permutation(len(prompts))
    if args.no_oversample and len(prompts) < args.num_prompts:
        raise ValueError(
            f"{args.dataset_path} has {len(prompts)} prompts; lower --num-prompts "
            f"{args.num_prompts}, or leave out --no-oversample to repeat them."
        )
    repeats = math.ceil(args.num_prompts / len(prompts))
    chosen: list[FilePrompt] = [prompts[i] for i in np.tile(order, repeats)[: args.num_prompts]]
    return [[Turn(prompt.content, prompt.output_len)] for prompt in chosen]


_DATASETS: Mapping[str, Callable[[argparse.Namespace, np.random.Generator], list[Session]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "prefix_repetition": _prefix_repetition,
    "cyclic": _cyclic,
    "multi_turn": _multi_turn,
    "custom": _custom,
}
