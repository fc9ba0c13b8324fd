"""`score_step`: log probabilities of given tokens, such as a prompt's, after their hidden rows.

Prompts are scored rarely and may be long, so this is one program of few rows, called as often as
there are rows for, and not one more for each static shape of a step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from paged.models.batch import SampledTokens
from paged.models.forward import HeadDef
from paged.models.programs import Program, ProgramSource
from paged.models.sampling import forbid, mask_words, with_logprobs

NUM_SCORED_ROWS = 64
"""Rows of the program: their logits, 39 MB of a vocabulary of 152,000, are its largest array."""

type Score = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], SampledTokens]
"""Compiled `score_step`: (head parameters, hidden rows, token ids, masks)."""


def score_step(
    head_params: Any,
    hidden: Array,
    token_ids: Array,
    masks: Array,
    *,
    head: HeadDef,
    max_logprobs: int,
) -> SampledTokens:
    """Return the log probability of one given token per row, and the likeliest ones.

    Args:
      head_params: parameters of the head.
      hidden: final hidden states, `[num_rows, hidden_size]`.
      token_ids: int32 `[num_rows]`, what follows each.
      masks: int32 `[num_rows, mask_words(vocab_size)]`, the bits of tokens that may follow.
      head: structure of the head (static).
      max_logprobs: alternatives reported per row.
    """
    logits = forbid(nnx.merge(head, head_params).logits(hidden), masks)
    return with_logprobs(logits, token_ids, max_logprobs=max_logprobs)


def compile_score(
    store: ProgramSource, head: HeadDef, head_params: Any, *, vocab_size: int, max_logprobs: int
) -> Score:
    """Compile `score_step` ahead of time, or load it.

    Args:
      store: makes or keeps compiled programs.
      head, head_params: see `paged.models.forward.split_head`.
      vocab_size: of the whole head.
      max_logprobs: see `score_step`.
    """
    embed = nnx.merge(head, head_params)
    hidden = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (NUM_SCORED_ROWS, embed.hidden_size), embed.dtype
    )
    step = functools.partial(score_step, head=head, max_logprobs=max_logprobs)
    masks = np.zeros((NUM_SCORED_ROWS, mask_words(vocab_size)), np.int32)
    arguments = head_params, hidden, np.zeros(NUM_SCORED_ROWS, np.int32), masks
    outputs = SampledTokens(0, 0, 0, 0, 0)  # type: ignore[arg-type]
    compiled: Score = store.make(Program(f"score {max_logprobs}", step, arguments, outputs))
    return compiled
