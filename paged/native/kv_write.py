"""The calls of the kernels that write to the cache, and the element types that they have."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged.native.attention import CACHE_DTYPES, QUERY_DTYPES

WRITE_TARGET = "paged_kv_write"
ROTATE_TARGET = "paged_rotate_and_write"
"""Names under which XLA knows the kernels."""


def unsupported(kv_cache: Array, *rows: Array) -> str | None:
    """Return why the kernels cannot write rows of these element types to this cache, or None."""
    dtypes = {str(array.dtype) for array in rows}
    if len(dtypes) > 1:
        return f"it takes queries, keys and values of one dtype, not of {', '.join(sorted(dtypes))}"
    (dtype,) = dtypes
    if dtype not in QUERY_DTYPES:
        return f"it writes {' or '.join(QUERY_DTYPES)}, not {dtype}"
    if str(kv_cache.dtype) not in CACHE_DTYPES:
        return f"it writes to a cache of {', '.join(CACHE_DTYPES)}, not of {kv_cache.dtype}"
    return None


def paged_kv_write(
    kv_cache: Array,
    k: Array,
    v: Array | None,
    slot_mapping: Array,
    kv_scales: Array | None,
    *,
    level: int = -1,
) -> Array:
    """Return `paged.kv_write.write_kv` of these arguments; needs `load_library`.

    The cache that goes in is the one that comes out: XLA copies it only if it is used afterwards.

    Args:
      kv_cache, k, v, slot_mapping, kv_scales: as in the public op.
      level: index in `paged.native.library.LEVELS` of the instructions to use; -1: the best.
    """
    call = jax.ffi.ffi_call(WRITE_TARGET, _like(kv_cache), input_output_aliases={0: 0})
    # Values that there are not are not read.
    values, scales = k if v is None else v, _or_empty(kv_scales, kv_cache)
    updated: Array = call(kv_cache, k, values, slot_mapping, scales, level=np.int32(level))
    return updated


def paged_rotate_and_write(
    q: Array,
    k: Array,
    v: Array | None,
    kv_cache: Array,
    cos: Array,
    sin: Array,
    slot_mapping: Array,
    kv_scales: Array | None,
    *,
    level: int = -1,
) -> tuple[Array, Array]:
    """Return `paged.rope_write.rotate_and_write_kv` of these arguments; needs `load_library`."""
    outputs = (_like(q), _like(kv_cache))
    call = jax.ffi.ffi_call(ROTATE_TARGET, outputs, input_output_aliases={1: 1})
    values, scales = k if v is None else v, _or_empty(kv_scales, kv_cache)
    rotated, updated = call(
        q, kv_cache, k, values, cos, sin, slot_mapping, scales, level=np.int32(level)
    )
    return rotated, updated


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def _or_empty(kv_scales: Array | None, kv_cache: Array) -> Array:
    """Return the scales, or the empty array that stands for none."""
    return jnp.zeros((0, kv_cache.shape[2]), jnp.float32) if kv_scales is None else kv_scales
