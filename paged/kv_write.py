"""`write_kv`: new keys and values into their slots; in place where the cache is donated."""

import jax.numpy as jnp
from jax import Array

from paged.backends import resolve_backend


def write_kv(
    kv_cache: Array, k: Array, v: Array, slot_mapping: Array, *, backend: str = "auto"
) -> Array:
    """Return one layer's cache with the keys and values of a step written to their slots.

    Inside a jitted function whose cache argument is donated no copy of the cache is made.

    Args:
      kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
      k, v: `[num_tokens, num_kv_heads, head_dim]`, cast to the cache's dtype.
      slot_mapping: `block_id * block_size + offset` of each token, int32 `[num_tokens]`, never
        negative (padding goes to the null block). If tokens share a slot, any of them may win.
      backend: see `resolve_backend`.

    Raises:
      ValueError: for shapes that do not belong together.
    """
    _check(kv_cache, k, v, slot_mapping)
    resolve_backend(backend)  # one scatter serves every backend there is
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    both = jnp.stack([k, v], axis=1).astype(kv_cache.dtype)  # [num_tokens, 2, kv_heads, head_dim]
    return kv_cache.at[blocks, :, :, offsets].set(both, mode="promise_in_bounds")


def write_token_ids(cached_ids: Array, token_ids: Array, slot_mapping: Array) -> Array:
    """Return the token ids beside the cache with those of a step written to their slots.

    Args:
      cached_ids: int32 `[num_blocks, block_size]`.
      token_ids: int32 `[num_tokens]`.
      slot_mapping: as in `write_kv`.
    """
    block_size = cached_ids.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    return cached_ids.at[blocks, offsets].set(token_ids, mode="promise_in_bounds")


def _check(kv_cache: Array, k: Array, v: Array, slot_mapping: Array) -> None:
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
        raise ValueError(
            f"kv_cache has shape {kv_cache.shape}, expected "
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]."
        )
    expected = (slot_mapping.shape[0], kv_cache.shape[2], kv_cache.shape[4])
    for name, array in (("k", k), ("v", v)):
        if array.shape != expected:
            raise ValueError(
                f"{name} has shape {array.shape}, expected [num_tokens, num_kv_heads, head_dim] = "
                f"{expected} for this slot_mapping and kv_cache."
            )
