"""`GGUFFile`: metadata and tensor table of a GGUF file, which stays memory-mapped.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged.models.errors import CheckpointError

_Type = gguf.GGUFValueType


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
    """The header of a GGUF file, read; tensor bytes are mapped, not read.

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
            # numpy's integers would wrap around silently where a damaged offset is too large.
            with np.errstate(over="raise"):
                reader = FastGGUFReader(self.path)
            if reader.endianess != gguf.GGUFEndian.LITTLE:
                raise ValueError("it is big-endian, only little-endian files are supported")
            self.metadata = {
                name: _value(row)
                for name, row in reader.fields.items()
                if not name.startswith("GGUF.")  # the reader's own: version and counts
            }
            self.tensors = {row.name: _tensor(row) for row in reader.tensors}
        except FileNotFoundError:
            raise self._error("no such file") from None
        except OSError as error:
            raise self._error(f"cannot be opened ({error.strerror})") from None
        except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # What the reader raises on damage; a name from the file may have line breaks.
            reason = " ".join(str(error).split())
            raise self._error(f"cannot be read as GGUF ({reason})") from None
        # Parts that were joined again say 0.
        if (parts := self.metadata.get("split.count", 0)) not in (0, 1):
            raise self._error(f"is one of {parts} parts; llama-gguf-split --merge joins them")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; fetch the file again or pass another one.")


class FastGGUFReader(gguf.GGUFReader):
    """`gguf.GGUFReader`, faster with arrays and strict about the end of the file.

    The original makes several memory-mapped arrays for each element of an array, which takes 2.3 s
    for the vocabulary of SmolLM2 (49,152 tokens), this one 0.3 s. Where the file ends too early
    the original returns short arrays, and loops over as many elements as a damaged count says.

    Both methods replace ones that gguf (0.19) does not promise to keep: tests compare the two
    readers and cut a file everywhere, so a change of theirs shows there.
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
    ) -> np.ndarray:
        dtype = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        count = int(count)
        if (end := offset + dtype.itemsize * count) > self.data.size:
            raise ValueError(f"it goes on to byte {end:,} but ends at {self.data.size:,}")
        return np.ndarray(count, dtype, self.data, offset)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], Any, Any]:
        is_array = raw_type == _Type.ARRAY
        item_type = self._get(orig_offs, np.uint32)[0] if is_array else None
        if item_type is None or item_type == _Type.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        count, offset = self._get(orig_offs + 4, np.uint64)[0], orig_offs + 12
        parts = []
        if item_type == _Type.STRING:
            for _ in range(count):
                parts.append(self._get_str(offset)[1])
                offset += 8 + parts[-1].nbytes
        else:
            parts.append(self._get(offset, self.gguf_scalar_to_np[_Type(item_type)], count))
            offset += parts[0].nbytes
        return offset - orig_offs, parts, range(len(parts)), [_Type.ARRAY, _Type(item_type)]


def _value(row: gguf.ReaderField) -> Any:
    """Return the value of a metadata key."""
    value = row.contents()
    if row.types[-1] != _Type.FLOAT32:
        return value
    # 1e-5 is stored as 9.999999747e-06; the checkpoint's own config said 1e-5.
    if isinstance(value, list):
        return [float(str(np.float32(one))) for one in value]
    return float(str(np.float32(value)))


def _tensor(row: gguf.ReaderTensor) -> GGUFTensor:
    shape = tuple(reversed(row.shape.tolist()))
    if not shape or 0 in shape:
        raise ValueError(f"tensor {row.name!r} has shape {shape}, which holds no values")
    rows = row.data.view(np.uint8).reshape(math.prod(shape[:-1]), -1)
    return GGUFTensor(row.name, shape, row.tensor_type, rows)
