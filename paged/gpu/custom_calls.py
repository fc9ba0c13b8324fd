"""The Triton kernels that travel inside a lowered program.

jax-triton puts a kernel's PTX into its custom call: a protobuf, compressed by zlib. So the kernels
of any program can be looked at, and an exported program needs no Triton where it runs.
"""

import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from paged.gpu.ptx import Kernel, inspect

# Field numbers of the kernel's message: its name and the shared memory it asks for at launch.
_NAME, _SHARED_BYTES = 1, 3

type _Fields = list[tuple[int, int | bytes]]


class KernelCode(NamedTuple):
    """A kernel in a program: its entry point, its code, and the shared memory it asks for."""

    name: str
    ptx: str
    shared_bytes: int


def triton_kernels(stablehlo: str) -> list[Kernel]:
    """Return the kernels of a program in StableHLO's text form, each once, as they are called."""
    return [inspect(code.ptx, code.name, code.shared_bytes) for code in kernel_codes(stablehlo)]


def kernel_codes(stablehlo: str) -> list[KernelCode]:
    """Return the same before assembly."""
    found: dict[str, KernelCode] = {}
    for text in re.findall(r'opaque = "((?:[^"\\]|\\.)*)"', stablehlo):
        try:
            message = zlib.decompress(_unescape(text))
        except zlib.error:
            continue  # another library's custom call
        for fields in _kernel_messages(message):
            ptx = next(value for value in fields.values() if _is_ptx(value))
            name, shared_bytes = fields[_NAME], fields.get(_SHARED_BYTES, 0)
            assert isinstance(ptx, bytes)
            assert isinstance(name, bytes)
            assert isinstance(shared_bytes, int)
            code = KernelCode(name.decode(), ptx.decode("latin-1"), shared_bytes)
            found.setdefault(code.ptx, code)
    return list(found.values())


def _unescape(text: str) -> bytes:
    """Undo MLIR's escapes: two hexadecimal digits, or a character as it is."""
    plain = {b"n": b"\n", b"t": b"\t"}

    def replace(match: re.Match[bytes]) -> bytes:
        escaped = match[1]
        return bytes.fromhex(escaped.decode()) if len(escaped) == 2 else plain.get(escaped, escaped)

    return re.sub(rb"\\([0-9A-Fa-f]{2}|.)", replace, text.encode("latin-1"), flags=re.DOTALL)


def _kernel_messages(message: bytes) -> Iterator[dict[int, int | bytes]]:
    """Yield the fields of each message that has PTX among them, however deep it lies."""
    fields = _parse(message) or []
    if any(_is_ptx(value) for _, value in fields):
        yield dict(fields)
        return
    for _, value in fields:
        if isinstance(value, bytes) and b".target sm_" in value:
            yield from _kernel_messages(value)


def _is_ptx(value: int | bytes) -> bool:
    return isinstance(value, bytes) and value.lstrip().startswith(b"//") and b".target" in value


def _parse(message: bytes) -> _Fields | None:
    """Return the (number, value) pairs of a protobuf message, or None if it is not one."""
    fields: _Fields = []
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    try:
        while position < len(message):
            number, kind = divmod(varint(), 8)
            if kind == 0:
                fields.append((number, varint()))
            elif kind == 2:
                size = varint()
                fields.append((number, message[position : position + size]))
                position += size
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                return None
    except IndexError:
        return None
    return fields if position == len(message) else None
