"""Small calls of the attention and write kernels, compared with numpy before they are used."""

import jax.numpy as jnp
import numpy as np

from paged.native.attention import paged_attention
from paged.native.kv_write import paged_kv_write

# Of values that are at most 1 in size; bfloat16 rounds weights and outputs.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


def attention_failure() -> str | None:
    """Return how a written cache and attention over it differ from numpy, or None."""
    rng = np.random.default_rng(0)
    length, block_size, heads, head_dim = 70, 16, 2, 64
    num_blocks = -(-length // block_size) + 1
    table = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)[None]
    positions = np.arange(length)
    slots = table[0, positions // block_size] * block_size + positions % block_size
    for dtype, tolerance in _TOLERANCES.items():
        q, k, v = (
            jnp.asarray(rng.uniform(-1, 1, (length, heads, head_dim)), dtype) for _ in range(3)
        )
        # Unowned slots hold NaN, as they may.
        empty = jnp.full((num_blocks, 2, heads, block_size, head_dim), jnp.nan, dtype)
        cache = paged_kv_write(empty, k, v, jnp.asarray(slots, jnp.int32), None)
        lens, starts = jnp.array([length], jnp.int32), jnp.array([0, length], jnp.int32)
        output = paged_attention(q, cache, jnp.asarray(table), lens, starts, scale=0.5)
        wide_q, wide_k, wide_v = (np.asarray(array, np.float64) for array in (q, k, v))
        logits = np.einsum("tnh,snh->nts", wide_q, wide_k) * 0.5
        logits[:, positions[:, None] < positions[None]] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("nts,snh->tnh", weights, wide_v)
        error = float(np.abs(np.asarray(output, np.float64) - expected).max())
        if not error <= tolerance:
            return f"{dtype} attention is off by {error:.3g}"
    return None
