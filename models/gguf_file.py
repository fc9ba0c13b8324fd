"""`GGUFFile`: metadata and tensor table of a GGUF file, which stays memory-mapped.

The `gguf` package has a reader too; it makes an array per metadata element and takes over two
seconds for a vocabulary of 49,152 tokens, this one 0.1. Dequantisation is the package's own.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged.models.errors import CheckpointError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type -> numpy type; 8 and 9 are strings and arrays.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table.

    Attributes:
      name: as in the file, such as "blk.0.attn_q.weight".
      shape: slowest axis first, as numpy has it (the file stores the reverse).
      kind: element or block type.
      data: the bytes, uint8 `[num_rows, row_bytes]`, a view of the file; a vector is one row.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: np.ndarray = field(repr=False)


class GGUFFile:
    """The header of a GGUF file, parsed; tensor bytes are mapped, not read.

    Args:
      path: the file.

    Attributes:
      path: the file.
      metadata: key -> value; arrays are lists, floats the shortest decimals that round to them.
      tensors: by name, in file order.

    Raises:
      CheckpointError: if there is no such file, or it is truncated, damaged or of another kind.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._buffer = _map(self.path)
            cursor = _Cursor(self._buffer)
            num_tensors, num_keys = _read_preamble(cursor)
            self.metadata = dict(_read_pair(cursor) for _ in range(num_keys))
            if (parts := self.metadata.get("split.count", 1)) > 1:
                raise _BadFileError(f"is one of {parts} parts; llama-gguf-split --merge joins them")
            rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
            self.tensors = self._locate(rows, cursor.offset)
        except _BadFileError as error:
            raise CheckpointError(
                f"{self.path}: {error}; fetch the file again or pass another one."
            ) from None

    def _locate(self, rows: list["_TensorRow"], header_end: int) -> dict[str, GGUFTensor]:
        """Attach to each row of the table its bytes."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _BadFileError(f"general.alignment={alignment!r} is no positive integer")
        start = -(-header_end // alignment) * alignment
        tensors = {}
        for row in rows:
            block, block_bytes = gguf.GGML_QUANT_SIZES[row.kind]
            if row.shape[-1] % block:
                raise _BadFileError(
                    f"tensor {row.name!r} has rows of {row.shape[-1]} values, "
                    f"no multiple of {row.kind.name}'s {block}"
                )
            num_rows, row_bytes = math.prod(row.shape[:-1]), row.shape[-1] // block * block_bytes
            offset, size = start + row.offset, num_rows * row_bytes
            if offset + size > len(self._buffer):
                raise _BadFileError(
                    f"it ends at byte {len(self._buffer):,}, tensor {row.name!r} at "
                    f"{offset + size:,}: the file is truncated"
                )
            data = np.frombuffer(self._buffer, np.uint8, size, offset)
            tensors[row.name] = GGUFTensor(
                row.name, row.shape, row.kind, data.reshape(num_rows, row_bytes)
            )
        if len(tensors) != len(rows):
            raise _BadFileError("two tensors share a name")
        return tensors


class _BadFileError(Exception):
    """What is wrong with the file, without its name."""


@dataclass(frozen=True, slots=True)
class _TensorRow:
    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int


class _Cursor:
    """Reads little-endian values one after the other and notices the end of the file."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.offset = 0

    def advance(self, num_bytes: int) -> int:
        """Step over bytes that must exist; return where they start."""
        start = self.offset
        if num_bytes > len(self.buffer) - start:
            raise _BadFileError("its header is truncated or damaged")
        self.offset = start + num_bytes
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.buffer, self.advance(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.buffer, self.advance(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.advance(length)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise _BadFileError(f"the string at byte {start:,} of its header is no UTF-8") from None

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise _BadFileError(f"its header has a value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.advance(dtype.itemsize * count)
        values = np.frombuffer(self.buffer, dtype, count, start)
        if dtype == np.float32:
            # 1e-5 is stored as 9.999999747e-06; the checkpoint's own config said 1e-5.
            return [float(str(value)) for value in values]
        values_list: list[Any] = values.tolist()
        return values_list


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise _BadFileError("no such file") from None
    except OSError as error:
        raise _BadFileError(f"cannot be opened ({error.strerror})") from None
    except ValueError:  # an empty file cannot be mapped
        raise _BadFileError("the file is empty") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata keys."""
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        raise _BadFileError("is no GGUF file (it does not start with 'GGUF')")
    cursor.advance(4)
    version = cursor.u32()
    if version not in _VERSIONS:
        raise _BadFileError(f"GGUF version {version} is not among {_VERSIONS} (little-endian)")
    return cursor.u64(), cursor.u64()


def _read_pair(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.string()
    return key, _read_value(cursor, cursor.u32())


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return cursor.numbers(kind, 1)[0]
    item_kind, count = cursor.u32(), cursor.u64()
    if item_kind == _STRING:
        return [cursor.string() for _ in range(count)]
    return cursor.numbers(item_kind, count)


def _read_tensor_row(cursor: _Cursor) -> _TensorRow:
    name = cursor.string()
    num_axes = cursor.u32()
    if not 1 <= num_axes <= 4:
        raise _BadFileError(f"tensor {name!r} has {num_axes} axes")
    shape = tuple(reversed([cursor.u64() for _ in range(num_axes)]))
    kind = cursor.u32()
    try:
        return _TensorRow(name, shape, gguf.GGMLQuantizationType(kind), cursor.u64())
    except ValueError:
        raise _BadFileError(f"tensor {name!r} has unknown type {kind}") from None
