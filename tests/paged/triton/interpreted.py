"""The Triton kernels as the interpreter runs them, with launches that the backend makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged.gpu.interpreter import interpret
from paged.gpu.traits import Gpu
from paged.triton.attention import attend_with
from paged.triton.kv_write import write_kv_with
from paged.triton.plan import AttentionPlan, make_plan
from tests.paged.oracle import Batch

# An A100: the only kind of target that decodes float8 by bit operations, as the interpreter must.
GPU = Gpu(compute_capability=80, num_multiprocessors=108)

# Small enough for contexts of a few hundred tokens to be cut into several parts.
WANTED_ITEMS, MIN_PART = 6, 128


@functools.partial(jax.jit, static_argnums=range(3, 9))
def _plan(block_tables, seq_lens, query_start_loc, *static) -> AttentionPlan:
    names = ("num_tokens", "group", "block_size", "sliding_window", "wanted_items", "min_part")
    return make_plan(
        block_tables, seq_lens, query_start_loc, **dict(zip(names, static, strict=True))
    )


def plan(batch: Batch, wanted_items: int = WANTED_ITEMS, min_part: int = MIN_PART) -> AttentionPlan:
    shape = batch.shape
    return _plan(
        *map(jnp.asarray, batch.arrays[2:]),
        shape.num_tokens,
        shape.queries_per_kv,
        shape.block_size,
        shape.sliding_window,
        wanted_items,
        min_part,
    )


def attend(batch: Batch, wanted_items: int = WANTED_ITEMS, min_part: int = MIN_PART) -> np.ndarray:
    shape = batch.shape
    options = shape.options | {"scale": shape.scale or shape.head_dim**-0.5}
    return np.asarray(
        attend_with(
            interpret,
            GPU,
            batch.q,
            batch.kv_cache,
            plan(batch, wanted_items, min_part),
            **options,
            kv_scales=batch.kv_scales,
            sinks=batch.sinks,
        )
    )


def write_kv(kv_cache, k, v, slots, kv_scales=None) -> np.ndarray:
    return np.asarray(write_kv_with(interpret, kv_cache, k, v, slots, kv_scales))
