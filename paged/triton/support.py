"""What the Triton kernels of attention take."""

from paged.attention_call import AttentionCall

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# Rows of the tile of one query row.
MAX_GROUP = 64


def unsupported(call: AttentionCall) -> str | None:
    """Return why the kernels cannot serve a call, or None if they can."""
    if call.num_planes != 2:
        return "it does not read a cache whose keys are its values"
    group = call.num_q_heads // call.num_kv_heads
    if call.head_dim not in HEAD_DIMS:
        return f"head_dim={call.head_dim} is none of {_listed(HEAD_DIMS)}"
    if call.block_size not in BLOCK_SIZES:
        return f"block_size={call.block_size} is none of {_listed(BLOCK_SIZES)}"
    if group > MAX_GROUP:
        return f"{group} q heads share a kv head, more than {MAX_GROUP}"
    if call.kv_cache_dtype not in (call.q_dtype, "float8_e4m3fn"):
        return (
            f"the cache is {call.kv_cache_dtype}, neither {call.q_dtype} like q nor float8_e4m3fn"
        )
    return None


def _listed(choices: tuple[int, ...]) -> str:
    return ", ".join(map(str, choices))
