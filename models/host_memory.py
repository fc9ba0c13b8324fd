"""Host memory of tensors on their way to the device: `empty_array`, `drop_pages`, `to_device`."""

import math
import mmap

import jax
import numpy as np

from paged.native.huge_pages import allocate

# Below, what is on the heap and stays there for a while is little.
_MIN_MAPPED_BYTES = 1 << 20


def empty_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory for an array, which the CPU backend keeps instead of copying it.

    JAX keeps what begins on 64 bytes, and NumPy's large arrays do not. The system has it back as
    soon as the array is deleted, as it does not from a heap.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_MAPPED_BYTES:
        return np.empty(shape, dtype)
    return allocate(num_bytes).view(dtype).reshape(shape)


def drop_pages(view: np.ndarray) -> None:
    """Let go of the pages of a mapped file behind a view; whoever reads it again has them again.

    They count as memory of this process until then. Nothing happens if the view is not read-only
    or of no mapped file.
    """
    owner: object = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if view.flags.writeable or not isinstance(owner, mmap.mmap) or not view.nbytes:
        return
    start = view.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first_page = start - start % mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, first_page, start + view.nbytes - first_page)


def to_device(values: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return an array on the devices, cast; each device's slice is read only for it.

    Args:
      values: a view of a file, or an array that the caller leaves to the device.
      dtype: element type on the devices.
      sharding: where it is to lie.
    """

    def device_slice(index: tuple[slice, ...] | None) -> np.ndarray:
        part = values[index]
        # On a CPU, JAX may keep a NumPy buffer instead of copying it. Weights must not be views of
        # a file: it could be replaced under them.
        if part.flags.writeable and part.dtype == dtype:
            return part
        private = empty_array(part.shape, dtype)
        np.copyto(private, part, casting="unsafe")
        return private

    array = jax.make_array_from_callback(values.shape, sharding, device_slice)
    # Waited for, or the buffers of many tensors would be in flight at once.
    jax.block_until_ready(array)  # type: ignore[no-untyped-call]
    return array
