"""The two programs of an engine step, and the only place that jits a model.

`forward_step` runs the model and is compiled per bucket; `sample_step` draws from its logits and
is compiled once per number of sequences, which several buckets share: the sampler is a third of
what XLA has to compile for a small model (docs/decisions/0005). The second program is dispatched
behind the first without waiting, and the logits never leave the device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from paged.kv_cache import KVCache
from paged.models.batch import SampledTokens
from paged.models.forward import compute_logits, forward
from paged.models.packing import BatchLayout
from paged.models.sampling import sample

type Forward = Callable[[tuple[Array, ...], KVCache, np.ndarray], tuple[Array, Array, KVCache]]
"""Compiled `forward_step`: (parameter leaves, cache, packed inputs) to its results."""

type Sample = Callable[[Array, Array, Array], SampledTokens]
"""Compiled `sample_step`: (logits, packed rows, cached token ids) to tokens."""


def forward_step(
    leaves: tuple[Array, ...],
    kv_cache: KVCache,
    packed: Array,
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
      treedef, graphdef: structure of the parameters and of the model (static).
      layout: the static shapes.

    Returns:
      Float32 logits `[num_seqs, vocab_size]` where each sequence ends (padding rows hold garbage),
      the part of `packed` that describes sequences, int32 `[layout.rows_size]`, and the cache.
    """
    params = jax.tree.unflatten(treedef, leaves)
    batch = layout.unpack_forward(packed)
    hidden, kv_cache = forward(graphdef, params, kv_cache, batch)
    logits = compute_logits(graphdef, params, hidden[batch.logits_indices])
    return logits, packed[: layout.rows_size], kv_cache


def sample_step(
    logits: Array, rows: Array, cached_token_ids: Array, *, layout: BatchLayout, max_logprobs: int
) -> SampledTokens:
    """Draw one token per sequence.

    Args:
      logits: float32 `[num_seqs, vocab_size]`.
      rows: int32 `[layout.rows_size]`, from `forward_step`.
      cached_token_ids: `KVCache.token_ids`, int32 `[num_blocks, block_size]`, this step's included.
      layout: the static shapes; only those of sequences matter.
      max_logprobs: alternatives reported per position when a row asks for log probabilities.
    """
    sampling, block_tables, seq_lens = layout.unpack_sampling(rows)

    def history() -> Array:  # [num_seqs, max_blocks_per_seq * block_size]
        return cached_token_ids[block_tables].reshape(block_tables.shape[0], -1)

    # The sampled token's position is the number of tokens known so far.
    return sample(logits, sampling, history, seq_lens, max_logprobs=max_logprobs)


def compile_forward(graphdef: Any, params: Any, kv_cache: KVCache, layout: BatchLayout) -> Forward:
    """Compile `forward_step` for one layout ahead of time; the cache is donated.

    Args:
      graphdef, params: the split model; `params` may be arrays or their abstract shapes.
      kv_cache: the cache, or its abstract shape.
      layout: the static shapes.
    """
    leaves, treedef = jax.tree.flatten(params)
    step = functools.partial(forward_step, treedef=treedef, graphdef=graphdef, layout=layout)
    lowered = jax.jit(step, donate_argnums=1).lower(tuple(leaves), kv_cache, layout.empty())
    compiled: Forward = lowered.compile()
    return compiled


def compile_sample(kv_cache: KVCache, layout: BatchLayout, *, max_logprobs: int) -> Sample:
    """Compile `sample_step` for the number of sequences of `layout` ahead of time."""
    step = functools.partial(sample_step, layout=layout, max_logprobs=max_logprobs)
    logits = np.zeros((layout.num_seqs, layout.vocab_size), np.float32)
    rows = layout.empty()[: layout.rows_size]
    compiled: Sample = jax.jit(step).lower(logits, rows, kv_cache.token_ids).compile()
    return compiled
