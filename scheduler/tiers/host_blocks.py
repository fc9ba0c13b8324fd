"""`HostBlocks`: blocks on the host between the device's layout and a tier's row of bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# What lies on such a boundary, a CPU device takes over without copying it.
_ALIGNMENT = 64


class HostBlocks:
    """Some blocks as the device has them: one array for each array of the cache.

    A tier holds a block as one row of bytes: its slice of each array, one after the other.

    Args:
      leaves: uint8 `[num_blocks, leaf_bytes]` each, contiguous.
    """

    def __init__(self, leaves: Sequence[NDArray[np.uint8]]) -> None:
        self.leaves = tuple(leaves)
        ends = np.cumsum([leaf.shape[1] for leaf in leaves]).tolist()
        self._parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    @classmethod
    def empty(cls, num_blocks: int, leaf_bytes: Sequence[int]) -> "HostBlocks":
        """Return room for `num_blocks` blocks of undefined content, in one piece of memory."""
        sizes = [-(-num_blocks * size // _ALIGNMENT) * _ALIGNMENT for size in leaf_bytes]
        memory = np.empty(sum(sizes) + _ALIGNMENT, np.uint8)
        start, leaves = -memory.ctypes.data % _ALIGNMENT, []
        for size, room in zip(leaf_bytes, sizes, strict=True):
            leaves.append(memory[start : start + num_blocks * size].reshape(num_blocks, size))
            start += room
        return cls(leaves)

    def copy_out(self, index: int, block: NDArray[np.uint8]) -> None:
        """Write block `index` to a row of bytes, uint8 `[block_bytes]`."""
        for leaf, part in zip(self.leaves, self._parts, strict=True):
            block[part] = leaf[index]

    def copy_in(self, index: int, block: NDArray[np.uint8]) -> None:
        """Read block `index` from a row of bytes, uint8 `[block_bytes]`."""
        for leaf, part in zip(self.leaves, self._parts, strict=True):
            leaf[index] = block[part]
