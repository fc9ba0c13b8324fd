"""The two programs of an engine step, and the only place that jits a model.

`forward_step` runs the model and is compiled per bucket; `sample_step` draws from its logits and
is compiled once per number of sequences, which several buckets share: the sampler is a third of
what XLA has to compile for a small model (docs/decisions/0005). The second program is dispatched
behind the first without waiting, and the logits never leave the device. Nor need its tokens, to
be the next step's input: `last_tokens` keeps them by batch row (docs/decisions/0016).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged.kv_cache import KVCache
from paged.models.batch import SampledTokens
from paged.models.forward import compute_logits, forward
from paged.models.packing import BatchLayout, in_flight
from paged.models.sampling import sample

type Forward = Callable[
    [tuple[Array, ...], KVCache, np.ndarray, Array], tuple[Array, Array, KVCache]
]
"""Compiled `forward_step`: (parameter leaves, cache, packed inputs, last tokens) to its results."""

type Sample = Callable[[Array, Array, Array, Array], tuple[SampledTokens, Array]]
"""Compiled `sample_step`: (logits, packed rows, cached token ids, last tokens) to its results."""


def forward_step(
    leaves: tuple[Array, ...],
    kv_cache: KVCache,
    packed: Array,
    last_tokens: Array,
    *,
    treedef: Any,
    graphdef: Any,
    layout: BatchLayout,
) -> tuple[Array, Array, KVCache]:
    """Run the model over one packed batch and write its keys and values.

    Args:
      leaves: the model's parameters, flattened: a tuple of arrays is flattened in C++ at every
        call, a nested state in Python.
      kv_cache: donated; use the returned one from then on.
      packed: int32 `[layout.size]`, see `BatchLayout`.
      last_tokens: the last sample of each batch row, int32 `[max_num_seqs]`; stands in for token
        ids that were in flight when the batch was built.
      treedef, graphdef: structure of the parameters and of the model (static).
      layout: the static shapes.

    Returns:
      Float32 logits `[num_seqs, vocab_size]` where each sequence ends (padding rows hold garbage),
      the part of `packed` that describes sequences, int32 `[layout.rows_size]`, and the cache.
    """
    params = jax.tree.unflatten(treedef, leaves)
    batch = layout.unpack_forward(packed)
    batch = dataclasses.replace(batch, token_ids=_resolve(batch.token_ids, last_tokens))
    hidden, kv_cache = forward(graphdef, params, kv_cache, batch)
    logits = compute_logits(graphdef, params, hidden[batch.logits_indices])
    return logits, packed[: layout.rows_size], kv_cache


def _resolve(token_ids: Array, last_tokens: Array) -> Array:
    """Replace the ids that `in_flight` made by the tokens they stand for."""
    rows = in_flight(token_ids)  # its own inverse
    # Known tokens are clipped to row 0, which `where` ignores.
    sampled = last_tokens.at[rows].get(mode="clip", wrap_negative_indices=False)
    return jnp.where(token_ids < 0, sampled, token_ids)


def sample_step(
    logits: Array,
    rows: Array,
    cached_token_ids: Array,
    last_tokens: Array,
    *,
    layout: BatchLayout,
    max_logprobs: int,
) -> tuple[SampledTokens, Array]:
    """Draw one token per sequence.

    Args:
      logits: float32 `[num_seqs, vocab_size]`.
      rows: int32 `[layout.rows_size]`, from `forward_step`.
      cached_token_ids: `KVCache.token_ids`, int32 `[num_blocks, block_size]`, this step's included.
      last_tokens: the last sample of each batch row, int32 `[max_num_seqs]`.
      layout: the static shapes; only those of sequences matter.
      max_logprobs: alternatives reported per position when a row asks for log probabilities.

    Returns:
      The samples, and `last_tokens` with those of the sequences that keep one.
    """
    sampling, block_tables, seq_lens, sampled_rows = layout.unpack_sampling(rows)

    def history() -> Array:  # [num_seqs, max_blocks_per_seq * block_size]
        return cached_token_ids[block_tables].reshape(block_tables.shape[0], -1)

    # The sampled token's position is the number of tokens known so far.
    samples = sample(logits, sampling, history, seq_lens, max_logprobs=max_logprobs)
    return samples, last_tokens.at[sampled_rows].set(samples.token_ids, mode="drop")


def compile_forward(
    graphdef: Any, params: Any, kv_cache: KVCache, layout: BatchLayout, *, max_num_seqs: int
) -> Forward:
    """Compile `forward_step` for one layout ahead of time; the cache is donated.

    Args:
      graphdef, params: the split model; `params` may be arrays or their abstract shapes.
      kv_cache: the cache, or its abstract shape.
      layout: the static shapes.
      max_num_seqs: batch rows.
    """
    leaves, treedef = jax.tree.flatten(params)
    step = functools.partial(forward_step, treedef=treedef, graphdef=graphdef, layout=layout)
    last_tokens = np.zeros(max_num_seqs, np.int32)
    jitted = jax.jit(step, donate_argnums=1)
    lowered = jitted.lower(tuple(leaves), kv_cache, layout.empty(), last_tokens)
    compiled: Forward = lowered.compile()
    return compiled


def compile_sample(
    kv_cache: KVCache, layout: BatchLayout, *, max_num_seqs: int, max_logprobs: int
) -> Sample:
    """Compile `sample_step` for the number of sequences of `layout` ahead of time."""
    step = functools.partial(sample_step, layout=layout, max_logprobs=max_logprobs)
    logits = np.zeros((layout.num_seqs, layout.vocab_size), np.float32)
    rows = layout.empty()[: layout.rows_size]
    last_tokens = np.zeros(max_num_seqs, np.int32)
    lowered = jax.jit(step).lower(logits, rows, kv_cache.token_ids, last_tokens)
    compiled: Sample = lowered.compile()
    return compiled
