"""`allocate`: memory in pages of 2 MB, where the system has them."""

import contextlib
import mmap

import numpy as np

PAGE_BYTES = 2 << 20


def allocate(num_bytes: int) -> np.ndarray:
    """Return zeros, uint8 `[num_bytes]`, that begin on a page of 2 MB.

    Whoever reads hundreds of megabytes in order waits for one translation of an address in 512
    pages of 4 KB instead of for each. Linux gives such pages to those who ask, if it has any; else,
    and on other systems, the pages are small. The memory lives as long as any view of it.

    Args:
      num_bytes: size, at least 1.
    """
    # Anonymous memory begins on a small page; so much more is sure to hold the beginning of a large
    # one. What nobody touches takes no memory.
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without large pages refuses.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % PAGE_BYTES
    return array[start : start + num_bytes]
