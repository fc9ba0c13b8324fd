"""What is read off compiled kernels, by hand-made examples."""

import zlib

import pytest

from paged.gpu.custom_calls import kernel_codes
from paged.gpu.ptx import Kernel, find_tool, inspect

PTX = b"//\n.version 8.6\n.target sm_90a\n"


def kernel(registers: int, shared_bytes: int, num_threads: int) -> Kernel:
    return Kernel("k", registers, 0, shared_bytes, num_threads, ptx="", arch="sm_90a")


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_threads", "programs"),
    [
        (128, 0, 128, 4),  # 65,536 registers / (128 * 128)
        (129, 0, 128, 3),  # given out in eights: 136 * 128
        (32, 0, 1024, 2),  # 64 warps
        (16, 0, 32, 32),  # no more than 32, whatever they take
        (32, 71_680, 128, 3),  # 228 KB / (70 + 1) KB
    ],
)
def test_programs_per_multiprocessor_follow_the_scarcest(
    registers: int, shared_bytes: int, num_threads: int, programs: int
):
    made = kernel(registers, shared_bytes, num_threads)
    assert made.programs_per_multiprocessor(228 * 1024) == programs


def test_missing_tool_is_named():
    with pytest.raises(FileNotFoundError, match="hammer is neither on PATH nor in an installed"):
        find_tool("hammer")


def test_code_without_a_target_is_refused():
    with pytest.raises(RuntimeError, match=r"the PTX of k has no line \.target"):
        inspect("// nothing", "k")


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message; numbers and lengths below 128 take one byte."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


def custom_call(message: bytes) -> str:
    text = "".join(f"\\{byte:02X}" for byte in zlib.compress(message))
    return f'stablehlo.custom_call @triton(%0) {{opaque = "{text}"}}'


def test_kernels_are_found_once_however_deep_they_lie():
    kernel_message = field(1, b"attention") + field(2, PTX) + field(3, 96)
    message = field(1, b"grid") + field(7, field(2, 5) + field(3, kernel_message))
    other = 'stablehlo.custom_call @other(%0) {opaque = "not compressed"}'
    program = "\n".join([other, custom_call(message), custom_call(message)])
    assert kernel_codes(program) == [("attention", PTX.decode(), 96)]
