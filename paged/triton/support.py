"""What the Triton kernels of attention take."""

from jax import Array

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# Rows of the tile of one query row.
MAX_GROUP = 64


def unsupported(q: Array, kv_cache: Array) -> str | None:
    """Return why the kernels cannot take these arguments, or None if they can."""
    return first_reason(
        num_q_heads=q.shape[1],
        num_kv_heads=kv_cache.shape[2],
        head_dim=q.shape[2],
        block_size=kv_cache.shape[3],
        q_dtype=str(q.dtype),
        kv_cache_dtype=str(kv_cache.dtype),
    )


def first_reason(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    q_dtype: str,
    kv_cache_dtype: str,
) -> str | None:
    """Return the same for shapes and names of dtypes."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} is none of {_listed(HEAD_DIMS)}"
    if block_size not in BLOCK_SIZES:
        return f"block_size={block_size} is none of {_listed(BLOCK_SIZES)}"
    if num_q_heads // num_kv_heads > MAX_GROUP:
        return f"{num_q_heads // num_kv_heads} q heads share a kv head, more than {MAX_GROUP}"
    if kv_cache_dtype not in (q_dtype, "float8_e4m3fn"):
        return f"the cache is {kv_cache_dtype}, neither {q_dtype} like q nor float8_e4m3fn"
    return None


def _listed(choices: tuple[int, ...]) -> str:
    return ", ".join(map(str, choices))
