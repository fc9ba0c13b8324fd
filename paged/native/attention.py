"""The call of the attention kernel, and the element types that it has."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

TARGET = "paged_attention"
"""Name under which XLA knows the kernel."""

QUERY_DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")


def paged_attention(
    q: Array | np.ndarray,
    kv_cache: Array | np.ndarray,
    block_tables: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    query_start_loc: Array | np.ndarray,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Array | None = None,
    sinks: Array | None = None,
    level: int = -1,
) -> Array:
    """Return `paged.attention.ragged_paged_attention` of these arguments; needs `load_library`.

    Args:
      q: `[num_tokens, num_q_heads, head_dim]`, one of `QUERY_DTYPES`.
      kv_cache: `[num_blocks, planes, num_kv_heads, block_size, head_dim]`, one of `CACHE_DTYPES`.
      block_tables, seq_lens, query_start_loc, scale, sliding_window, soft_cap, kv_scales, sinks:
        as in the public op.
      level: index in `paged.native.library.LEVELS` of the instructions to use; -1: the best.
    """
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)  # type: ignore[no-untyped-call]
    output: Array = jax.ffi.ffi_call(TARGET, shape)(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        # An empty array stands for none.
        jnp.zeros((0, kv_cache.shape[2]), jnp.float32) if kv_scales is None else kv_scales,
        jnp.zeros(0, jnp.float32) if sinks is None else jnp.asarray(sinks, jnp.float32),
        scale=np.float32(scale),
        sliding_window=np.int64(sliding_window or 0),
        soft_cap=np.float32(soft_cap or 0),
        level=np.int32(level),
    )
    return output
