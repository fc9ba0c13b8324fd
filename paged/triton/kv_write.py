"""The Triton backend of `write_kv`: one program per token writes all of its heads."""

import jax.numpy as jnp
from jax import Array

from paged.triton.kernels.write import write_kv_kernel
from paged.triton.launch import Launch, Runner, run_on_gpu
from paged.triton.spec import WriteSpec


def write_kv(
    kv_cache: Array, k: Array, v: Array, slot_mapping: Array, kv_scales: Array | None
) -> Array:
    """Return the cache with new keys and values, as `paged.kv_write.write_kv` documents."""
    return write_kv_with(run_on_gpu, kv_cache, k, v, slot_mapping, kv_scales)


def write_kv_with(
    run: Runner,
    kv_cache: Array,
    k: Array,
    v: Array,
    slot_mapping: Array,
    kv_scales: Array | None,
) -> Array:
    """Return the same by a kernel that `run` runs."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    spec = WriteSpec(
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        has_kv_scales=kv_scales is not None,
        is_e4m3=kv_cache.dtype == jnp.float8_e4m3fn,
    )
    # A pointer must be passed even where nothing goes through it.
    scales = slot_mapping if kv_scales is None else kv_scales
    (written,) = run(
        Launch(
            kernel=write_kv_kernel,
            grid=(k.shape[0],),
            inputs=(k, v, slot_mapping, scales),
            updated=(kv_cache,),
            outputs=(),
            spec=spec,
            num_warps=4,
            num_stages=1,
        )
    )
    return written


def unsupported(kv_cache: Array) -> str | None:
    """Return why `write_kv` cannot fill this cache, or None if it can."""
    if kv_cache.shape[1] != 2:
        return "it does not write a cache whose keys are its values"
    if kv_cache.dtype == jnp.float8_e5m2:
        return "it does not write float8_e5m2"
    return None
