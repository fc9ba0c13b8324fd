"""Sessions of a dataset as the bodies of requests, for completions or for chats."""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged.server.bench_datasets import Session, Turn
from paged.server.bench_load import Exchange
from paged.server.bench_spelling import TokenSpeller, WordSpeller
from paged.server.bench_timeline import Timeline

CHAT = "/v1/chat/completions"

# The ids of special tokens are first in most vocabularies.
_FIRST_ID = 256


def make_exchanges(args: argparse.Namespace, sessions: Sequence[Session]) -> list[list[Exchange]]:
    """Return what is sent: the same sessions with bodies, and a timeline for each request.

    Raises: ValueError if the endpoint has no place for such content.
    """
    prompts = _Chats(args.seed) if args.endpoint == CHAT else _Texts(args.seed, args.vocab_size)
    common = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "ignore_eos": args.ignore_eos or None,
    }
    common = {name: value for name, value in common.items() if value is not None}
    models = _models(args, len(sessions))
    return [
        [
            Exchange(
                {"model": model, **common, **prompts.fields(turn, index > 0), **args.extra_body},
                # A server that does not count tokens is taken at our word.
                Timeline(num_prompt_tokens=turn.num_tokens),
                turn.pause,
            )
            for index, turn in enumerate(session)
        ]
        for model, session in zip(models, sessions, strict=True)
    ]


def _models(args: argparse.Namespace, count: int) -> list[str]:
    """Return the model that each session asks: the one, or one of the adapters."""
    if not args.lora_modules:
        return [args.model] * count
    if args.lora_assignment == "round-robin":
        return list(itertools.islice(itertools.cycle(args.lora_modules), count))
    # A generator of its own: the prompts are the same with adapters and without.
    chosen = np.random.default_rng(args.seed).integers(len(args.lora_modules), size=count)
    return [args.lora_modules[index] for index in chosen]


class _Texts:
    """Prompts of completions: token ids for named content, texts as they are."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        low = min(_FIRST_ID, vocab_size // 2)
        self._speller = TokenSpeller(seed, range(low, vocab_size))

    def fields(self, turn: Turn, is_later: bool) -> dict[str, Any]:
        content = turn.content
        if is_later or not isinstance(content, str | tuple):
            raise ValueError(
                f"/v1/completions takes no chats of several messages; add --endpoint {CHAT}."
            )
        prompt = content if isinstance(content, str) else self._speller.spell(content)
        return {"prompt": prompt, "max_tokens": turn.output_len}


class _Chats:
    """Messages of chats: words for named content; the content named "system" is a system prompt."""

    def __init__(self, seed: int) -> None:
        self._speller = WordSpeller(seed)

    def fields(self, turn: Turn, _is_later: bool) -> dict[str, Any]:
        return {"messages": self._messages(turn), "max_completion_tokens": turn.output_len}

    def _messages(self, turn: Turn) -> list[Any]:
        content = turn.content
        if isinstance(content, str):
            return [{"role": "user", "content": content}]
        if not isinstance(content, tuple):
            return list(content)
        system = [segment for segment in content if segment[0] == "system"]
        user = [segment for segment in content if segment[0] != "system"]
        messages = [{"role": "system", "content": self._speller.spell(system)}] if system else []
        return [*messages, {"role": "user", "content": self._speller.spell(user)}]
