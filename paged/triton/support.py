"""What the Triton kernels of attention take."""

import jax.numpy as jnp
from jax import Array

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
_MAX_GROUP = 64


def unsupported(q: Array, kv_cache: Array) -> str | None:
    """Return why the kernels cannot take these arguments, or None if they can."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} is none of {_listed(HEAD_DIMS)}"
    if block_size not in BLOCK_SIZES:
        return f"block_size={block_size} is none of {_listed(BLOCK_SIZES)}"
    if num_q_heads // num_kv_heads > _MAX_GROUP:
        return f"more than {_MAX_GROUP} q heads share a kv head"
    if kv_cache.dtype not in (q.dtype, jnp.float8_e4m3fn):
        return f"the cache is {kv_cache.dtype}, neither {q.dtype} like q nor float8_e4m3fn"
    return None


def _listed(choices: tuple[int, ...]) -> str:
    return ", ".join(map(str, choices))
