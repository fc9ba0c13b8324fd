"""`forward_step`: the pure function of one engine step, and the only place that jits a model."""

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

type Step = Callable[[tuple[Array, ...], KVCache, np.ndarray], tuple[SampledTokens, KVCache]]
"""A compiled step: (parameter leaves, cache, packed inputs) -> (samples, updated cache)."""


def forward_step(
    leaves: tuple[Array, ...],
    kv_cache: KVCache,
    packed: Array,
    *,
    treedef: Any,
    graphdef: Any,
    layout: BatchLayout,
    max_logprobs: int,
) -> tuple[SampledTokens, KVCache]:
    """Run the model over one packed batch, write its keys and values, and sample.

    Args:
      leaves: the model's parameters, flattened: a tuple of arrays is flattened in C++ at every
        call, a nested state in Python.
      kv_cache: donated; use the returned one from then on.
      packed: int32 `[layout.size]`, see `BatchLayout`.
      treedef, graphdef: structure of the parameters and of the model (static).
      layout: the static shapes.
      max_logprobs: alternatives reported per position when a row asks for log probabilities.

    Returns:
      Samples of every sequence row (padding rows hold garbage) and the updated cache.
    """
    params = jax.tree.unflatten(treedef, leaves)
    batch, sampling = layout.unpack(packed)
    hidden, kv_cache = forward(graphdef, params, kv_cache, batch)
    logits = compute_logits(graphdef, params, hidden[batch.logits_indices])
    block_tables = batch.attention.block_tables

    def history() -> Array:  # [num_seqs, max_blocks_per_seq * block_size]
        return kv_cache.token_ids[block_tables].reshape(block_tables.shape[0], -1)

    # The sampled token's position is the number of tokens known so far.
    samples = sample(logits, sampling, history, batch.attention.seq_lens, max_logprobs=max_logprobs)
    return samples, kv_cache


def compile_step(
    graphdef: Any, params: Any, kv_cache: KVCache, layout: BatchLayout, *, max_logprobs: int
) -> Step:
    """Compile `forward_step` for one layout ahead of time; the cache is donated.

    Args:
      graphdef, params: the split model; `params` may be arrays or their abstract shapes.
      kv_cache: the cache, or its abstract shape.
      layout: the static shapes.
      max_logprobs: as in `forward_step`.
    """
    leaves, treedef = jax.tree.flatten(params)
    step = functools.partial(
        forward_step, treedef=treedef, graphdef=graphdef, layout=layout, max_logprobs=max_logprobs
    )
    lowered = jax.jit(step, donate_argnums=1).lower(tuple(leaves), kv_cache, layout.empty())
    compiled: Step = lowered.compile()
    return compiled
