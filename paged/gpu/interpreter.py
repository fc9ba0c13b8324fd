"""Triton kernels on the CPU: the runner that hands launches to Triton's own interpreter.

The interpreter executes a kernel program by program in NumPy. It has to be chosen in the
environment, TRITON_INTERPRET=1, before Triton is imported. It expects torch tensors but touches
only a handful of their methods, which `_HostArray` offers for a NumPy array.

It computes in float32, float16 and integers. bfloat16 is refused: it would read the bits as
integers. float8 is handed over as just that, for kernels that decode its bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton

from paged.triton.launch import Launch

type _Numbers = np.ndarray[Any, np.dtype[Any]]


def interpret(launch: Launch) -> Sequence[_Numbers]:
    """Run a launch on arrays that NumPy can read; return the updated arrays, then the outputs.

    New arrays are full of NaN before the kernel runs, so that what it leaves out is seen.

    Raises:
      RuntimeError: if Triton was imported to compile.
      TypeError: if the interpreter cannot read an array's dtype.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
    updated = [np.array(array) for array in launch.updated]
    outputs = [np.full(each.shape, np.nan, each.dtype) for each in launch.outputs]
    inputs = [np.array(array) for array in launch.inputs]
    arguments = [_HostArray(array) for array in (*inputs, *updated, *outputs)]
    launch.kernel[launch.grid](*arguments, spec=launch.spec)
    return (*updated, *outputs)


class _HostArray:
    """The part of a torch tensor that the interpreter calls, over NumPy."""

    def __init__(self, array: _Numbers) -> None:
        if array.dtype.name.startswith("float8"):
            array = array.view(np.uint8)
        if array.dtype.kind not in "fiub":
            raise TypeError(f"the interpreter cannot read {array.dtype}; use float32 or float16")
        self.array = array
        self.dtype = array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def size(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> "_HostArray":
        return self

    def cpu(self) -> "_HostArray":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_HostArray":
        return self

    def set_(self, *_: Any) -> None:
        """Nothing to do: the storage is the array's own."""

    def copy_(self, other: "_HostArray") -> None:
        """Nothing to do: kernels write to the array's own memory."""
