"""`rotate_and_write_kv`: rotary embedding of queries and keys, and the write to the paged cache.

One op, because a kernel that has a key in its registers can as well put it where it belongs.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from paged import backends
from paged.attention import check_kv_scales
from paged.kv_write import check_rows, scatter_kv, unique_slots, unsupported
from paged.native import kv_write as native


def rotate_and_write_kv(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"] | None,
    kv_cache: Float[Array, "num_blocks planes num_kv_heads block_size head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
    slot_mapping: Int[Array, " num_tokens"],
    *,
    kv_scales: Float[Array, "planes num_kv_heads"] | None = None,
    backend: str = "auto",
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_blocks planes num_kv_heads block_size head_dim"],
]:
    """Return the rotated queries, and the cache with the rotated keys and the values.

    The same as `rotate` of q and k and then `write_kv`: keys are rounded to their dtype before
    they are scaled and cast to the cache's. As there, the update is in place if the cache is
    donated. Only the null block may be left as it is: nobody reads what padding puts there.

    Args:
      q: `[num_tokens, num_q_heads, head_dim]`.
      k, v, kv_cache, slot_mapping, kv_scales: as in `write_kv`.
      cos, sin: float32 `[num_tokens, half_dim]`, see `rotate`.
      backend: "auto": the platform's best implementation that has these dtypes; or the name of one
        as a promise.

    Raises:
      ValueError: if the shapes do not fit together, or if `backend` is unknown.
      TypeError: if `slot_mapping` is not int32, or the angles are not float32.
      NotImplementedError: if `backend` cannot run here or lacks the dtypes; the message gives the
        reason.

    Source: arXiv:2104.09864 (rotation), arXiv:2309.06180 (paged cache).
    """
    check_rows(kv_cache, k, v, slot_mapping)
    check_kv_scales(kv_scales, kv_cache)
    _check_angles(q, k, cos, sin)
    name = backends.resolve_backend(
        backend,
        backends.current_platform(),
        unsupported=lambda name: unsupported(name, kv_cache, q, k, v),
    )
    return _IMPLEMENTATIONS[name](q, k, v, kv_cache, cos, sin, slot_mapping, kv_scales)


def rotate(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Rotate feature i of every head against feature `i + half_dim`, in float32.

    Features from `2 * half_dim` on stay as they are, so a rotation of a part of a head has fewer
    angles than half its features. This is the half-split layout of Hugging Face checkpoints, not
    the interleaved one of the paper; the two differ by a permutation of the q and k rows.
    """
    half_dim = cos.shape[1]
    first, second, rest = jnp.split(x, [half_dim, 2 * half_dim], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def _check_angles(q: Array, k: Array, cos: Array, sin: Array) -> None:
    num_tokens, _, head_dim = k.shape
    if q.ndim != 3 or (q.shape[0], q.shape[2]) != (num_tokens, head_dim):
        raise ValueError(
            f"q has shape {q.shape}; k asks for [num_tokens, num_q_heads, head_dim] = "
            f"({num_tokens}, num_q_heads, {head_dim})."
        )
    for name, array in (("cos", cos), ("sin", sin)):
        if array.dtype != jnp.float32:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be float32.")
        if array.ndim != 2 or array.shape[0] != num_tokens or 2 * array.shape[1] > head_dim:
            raise ValueError(
                f"{name} has shape {array.shape}; it must be [num_tokens, half_dim] with "
                f"num_tokens={num_tokens} and at most half of head_dim={head_dim}."
            )
    if cos.shape != sin.shape:
        raise ValueError(f"cos has shape {cos.shape} and sin {sin.shape}; they must be equal.")


def _compose(
    q: Array,
    k: Array,
    v: Array | None,
    kv_cache: Array,
    cos: Array,
    sin: Array,
    slot_mapping: Array,
    kv_scales: Array | None,
) -> tuple[Array, Array]:
    """Leave both to XLA, on a GPU too: there it rotates inside of its scatter.

    It takes keys and values right from the partial sums of the products before, which a kernel of
    ours would have to read from memory after another had put them there (docs/decisions/0031).
    """
    # Without the promise, XLA on a GPU writes each 16-bit element by a loop of atomic exchanges.
    slots = unique_slots(kv_cache, slot_mapping)
    keys = rotate(k, cos, sin)
    kv_cache = scatter_kv(kv_cache, keys, v, slots, kv_scales, has_unique_slots=True)
    return rotate(q, cos, sin), kv_cache


type _Implementation = Callable[
    [Array, Array, Array | None, Array, Array, Array, Array, Array | None], tuple[Array, Array]
]

_IMPLEMENTATIONS: Mapping[str, _Implementation] = {
    "mosaic": _compose,
    "native": native.paged_rotate_and_write,
    "triton": _compose,
    "xla": _compose,
}
