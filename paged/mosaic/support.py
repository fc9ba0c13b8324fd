"""What the Mosaic kernel of attention takes, and where it can be compiled."""

import re

from paged.attention_call import AttentionCall

HEAD_DIMS = (64, 128, 256)
MAX_BLACKWELL_HEAD_DIM = 128
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
# What the Triton backend takes, which serves decodes.
MAX_GROUP = 64

# Releases of ptxas that miscompile masked loops of wgmma, per the check in JAX's own kernel
# (jax/experimental/pallas/ops/gpu/attention_mgpu.py): from 12.8 on, before 12.9.1, build 12.9.86.
_FIRST_BAD: tuple[int, ...] = (12, 8)
_FIRST_GOOD: tuple[int, ...] = (12, 9, 86)


def unsupported(call: AttentionCall, compute_capability: int) -> str | None:
    """Return why the kernel cannot serve a call on a GPU, or None if it can."""
    if call.num_planes != 2:
        return "it does not read a cache whose keys are its values"
    group = call.num_q_heads // call.num_kv_heads
    if call.head_dim not in HEAD_DIMS:
        return f"head_dim={call.head_dim} is none of {_listed(HEAD_DIMS)}"
    if call.head_dim > MAX_BLACKWELL_HEAD_DIM and compute_capability >= 100:
        # Of 512 columns of tensor memory, two tiles of 256 dimensions are all.
        return f"head_dim={call.head_dim} is more than {MAX_BLACKWELL_HEAD_DIM}, on Blackwell"
    if call.block_size not in BLOCK_SIZES:
        return f"block_size={call.block_size} is none of {_listed(BLOCK_SIZES)}"
    if group > MAX_GROUP:
        return f"{group} q heads share a kv head, more than {MAX_GROUP}"
    if call.q_dtype not in DTYPES:
        return f"q is {call.q_dtype}, none of {_listed(DTYPES)}"
    if call.kv_cache_dtype != call.q_dtype:
        return f"the cache is {call.kv_cache_dtype}, not {call.q_dtype} like q"
    return None


def why_no_gpu(compute_capability: str) -> str | None:
    """Return why the kernel cannot run on a GPU, or None if it can."""
    if compute_capability in ("9.0", "10.0"):
        return None
    return (
        "it needs an NVIDIA GPU of compute capability 9.0 (Hopper) or 10.0 (Blackwell), not "
        f"{compute_capability}"
    )


def why_no_assembler(nvcc_version: str | None, cuda_version: int | None) -> str | None:
    """Return why the kernel must not be compiled here, or None if it may be.

    Args:
      nvcc_version: of the package with the ptxas of CUDA 12, as in "12.9.86"; None if it is not
        installed.
      cuda_version: of the CUDA that JAX uses, as in 12090; None if there is none. It does not tell
        12.9.0 from 12.9.1, which is then given the benefit of the doubt.
    """
    if cuda_version is not None and cuda_version >= 13000:
        return None
    if nvcc_version is not None:
        version, first_good = tuple(map(int, re.findall(r"\d+", nvcc_version))), _FIRST_GOOD
    elif cuda_version is not None:
        version, first_good = (cuda_version // 1000, cuda_version % 1000 // 10), _FIRST_GOOD[:2]
    else:
        return None
    if not _FIRST_BAD <= version < first_good:
        return None
    found = ".".join(map(str, version))
    return (
        f"ptxas {found} miscompiles its masked loops; install 12.9.1 or newer "
        "(pip install -U nvidia-cuda-nvcc-cu12), or CUDA 13"
    )


def _listed(choices: tuple[object, ...]) -> str:
    return ", ".join(map(str, choices))
