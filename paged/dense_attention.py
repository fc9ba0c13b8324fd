"""`dense_attention`: causal attention without a cache, which JAX can differentiate.

For training and for log probabilities of whole texts. Scores of all pairs of positions are in
memory at once; loops of traced length, which `ragged_paged_attention` has, have no gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

# Not -inf: the gradient of a maximum of -inf alone is NaN.
_MASKED = -0.7 * float(np.finfo(np.float32).max)


def dense_attention(
    q: Float[Array, "num_seqs length num_q_heads head_dim"],
    k: Float[Array, "num_seqs length num_kv_heads head_dim"],
    v: Float[Array, "num_seqs length num_kv_heads head_dim"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
) -> Float[Array, "num_seqs length num_q_heads head_dim"]:
    """Return the attention of each position to those up to it, in q's dtype.

    Args:
      q: `[num_seqs, length, num_q_heads, head_dim]`.
      k, v: `[num_seqs, length, num_kv_heads, head_dim]`; query head n uses kv head
        `n // (num_q_heads // num_kv_heads)`.
      scale, sliding_window, soft_cap, sinks: as in `paged.attention.ragged_paged_attention`.

    Raises:
      ValueError: if the shapes do not fit together.
    """
    num_seqs, length, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    expected = (num_seqs, length, num_kv_heads, head_dim)
    if k.shape != expected or v.shape != expected or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q has shape {q.shape}, k {k.shape} and v {v.shape}; k and v must have q's shape but "
            "for their heads, of which q has a multiple."
        )
    scale = head_dim**-0.5 if scale is None else scale
    # [B, T, K, G, H]: G query heads share a kv head.
    grouped = q.reshape(num_seqs, length, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    age = jnp.arange(length)[:, None] - jnp.arange(length)[None]  # of a key, seen from a query
    is_visible = (age >= 0) & (age < (sliding_window or length))
    scores = jnp.where(is_visible[None, None, None], scores, _MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    mixed = jnp.einsum(
        "BKGTS,BSKH->BTKGH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return mixed.reshape(q.shape).astype(q.dtype)
