"""`write_kv`: puts new keys and values into the paged cache, in place under donation."""

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from paged import backends
from paged.attention import check_kv_scales
from paged.native import kv_write as native


def write_kv(
    kv_cache: Float[Array, "num_blocks planes num_kv_heads block_size head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"] | None,
    slot_mapping: Int[Array, " num_tokens"],
    *,
    kv_scales: Float[Array, "planes num_kv_heads"] | None = None,
    backend: str = "auto",
) -> Float[Array, "num_blocks planes num_kv_heads block_size head_dim"]:
    """Return one layer's cache with the keys and values of new tokens in their slots.

    Inside a jit whose cache argument is donated the update happens in place: nothing of the size
    of the cache is copied. Write the whole batch before any attention reads, so that a sequence
    may read blocks that another one fills in the same step.

    Args:
      kv_cache: one layer, `[num_blocks, planes, num_kv_heads, block_size, head_dim]`; the planes
        are keys and values, or one that is both.
      k: keys, `[num_tokens, num_kv_heads, head_dim]`; cast to the cache's dtype. 8-bit floats
        saturate: what is too large becomes the largest finite value.
      v: values, shaped as `k`; None exactly if the cache has one plane.
      slot_mapping: int32 `[num_tokens]`, `block_id * block_size + offset`, never negative.
        Padding tokens name a slot of the null block, where the last of several writers wins.
        A slot past the end of the cache writes nothing.
      kv_scales: float32 `[planes, num_kv_heads]`; keys and values of a head are divided by them
        before they are cast, and attention must be given the same. None: 1.
      backend: "auto": the platform's best implementation that has these dtypes; or the name of one
        as a promise.

    Raises:
      ValueError: if the shapes do not fit together, or if `backend` is unknown.
      TypeError: if `slot_mapping` is not int32.
      NotImplementedError: if `backend` cannot run here or lacks the dtypes; the message gives the
        reason.

    Source: PagedAttention, arXiv:2309.06180.
    """
    check_rows(kv_cache, k, v, slot_mapping)
    check_kv_scales(kv_scales, kv_cache)
    name = _writer_name(backend, kv_cache, k, v)
    return _WRITERS[name](kv_cache, k, v, slot_mapping, kv_scales)


def unsupported(name: str, kv_cache: Array, *rows: Array | None) -> str | None:
    """Return why the backend of this name cannot write such rows into such a cache, or None."""
    reason: str | None = None
    if name == "native":
        reason = native.unsupported(kv_cache, *(array for array in rows if array is not None))
    elif name == "triton":
        reason = _triton().unsupported(kv_cache)
    return reason


def write_token_ids(
    token_ids_cache: Int[Array, "num_blocks block_size"],
    token_ids: Int[Array, " num_tokens"],
    slot_mapping: Int[Array, " num_tokens"],
) -> Int[Array, "num_blocks block_size"]:
    """Return the token cache with the ids of new tokens in their slots.

    Args:
      token_ids_cache: int32 `[num_blocks, block_size]`; updated in place if donated.
      token_ids: int32 `[num_tokens]`.
      slot_mapping: as in `write_kv`.
    """
    block_size = token_ids_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    return token_ids_cache.at[blocks, offsets].set(
        token_ids.astype(token_ids_cache.dtype), mode="drop"
    )


def check_rows(kv_cache: Array, k: Array, v: Array | None, slot_mapping: Array) -> None:
    """Raise unless the keys and values of new tokens fit their slots and the cache."""
    num_planes = 1 if v is None else 2
    if kv_cache.ndim != 5 or kv_cache.shape[1] != num_planes:
        given = "keys alone" if v is None else "keys and values"
        raise ValueError(
            f"kv_cache has shape {kv_cache.shape}; for {given} it must be "
            f"[num_blocks, {num_planes}, num_kv_heads, block_size, head_dim]."
        )
    expected = (slot_mapping.shape[0], kv_cache.shape[2], kv_cache.shape[4])
    for name, array in (("k", k), ("v", v)):
        if array is not None and array.shape != expected:
            raise ValueError(
                f"{name} has shape {array.shape}; slot_mapping and kv_cache ask for "
                f"[num_tokens, num_kv_heads, head_dim] = {expected}."
            )
    if slot_mapping.dtype != jnp.int32:
        raise TypeError(f"slot_mapping has dtype {slot_mapping.dtype}; it must be int32.")


def _writer_name(backend: str, kv_cache: Array, k: Array, v: Array | None) -> str:
    resolve = functools.partial(
        backends.resolve_backend,
        platform=backends.current_platform(),
        unsupported=lambda name: unsupported(name, kv_cache, k, v),
    )
    name = resolve(backend)
    # "mosaic" is for attention alone: beside it, the best of the others writes.
    return resolve("auto") if name == "mosaic" else name


def scatter_kv(
    kv_cache: Array,
    k: Array,
    v: Array | None,
    slot_mapping: Array,
    kv_scales: Array | None,
    *,
    has_unique_slots: bool = False,
) -> Array:
    """Return the cache with new keys and values, as `write_kv` documents, by XLA.

    Args:
      kv_cache, k, v, slot_mapping, kv_scales: as in `write_kv`.
      has_unique_slots: a promise that no slot occurs twice; see `unique_slots`.
    """
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    # One scatter of stacked K and V, although XLA:CPU materialises the stack (1.6 MB a layer for a
    # prefill of 1024 tokens of SmolLM2): it expands each scatter into a loop of its own, and two
    # per layer cost half a second of compile time in every program of 30 layers.
    planes = [k] if v is None else [k, v]
    rows = jnp.stack(planes, axis=1)  # [num_tokens, planes, kv_heads, head_dim]
    if kv_scales is not None:
        rows = rows.astype(jnp.float32) / kv_scales[None, ..., None]
    rows = _saturate(rows, kv_cache.dtype).astype(kv_cache.dtype)
    return kv_cache.at[blocks, :, :, offsets].set(
        rows, mode="drop", unique_indices=has_unique_slots
    )


def unique_slots(kv_cache: Array, slot_mapping: Array) -> Array:
    """Return the slots with every token that has none of its own past the end of the cache.

    Those are the tokens of padding, which share the null block, and those past the end already.
    """
    num_blocks, _, _, block_size, _ = kv_cache.shape
    num_slots = num_blocks * block_size
    past_the_end = num_slots + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    is_own = (slot_mapping >= block_size) & (slot_mapping < num_slots)
    return jnp.where(is_own, slot_mapping, past_the_end)


def _triton() -> ModuleType:
    """Return the Triton backend, which is imported only where it is considered."""
    return importlib.import_module("paged.triton.kv_write")


def _write_by_triton(
    kv_cache: Array, k: Array, v: Array | None, slot_mapping: Array, kv_scales: Array | None
) -> Array:
    assert v is not None, "it writes no cache of one plane"
    written: Array = _triton().write_kv(kv_cache, k, v, slot_mapping, kv_scales)
    return written


def _saturate(rows: Array, dtype: np.dtype[Any]) -> Array:
    """Clip to the finite values of an 8-bit float; a cast would make NaN of what is beyond."""
    if dtype.itemsize > 1:
        return rows
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(rows, -largest, largest)


type _Writer = Callable[[Array, Array, Array | None, Array, Array | None], Array]

_WRITERS: Mapping[str, _Writer] = {
    "native": native.paged_kv_write,
    "triton": _write_by_triton,
    "xla": scatter_kv,
}
