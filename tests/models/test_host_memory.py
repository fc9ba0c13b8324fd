"""Memory of tensors: JAX keeps it, and pages of files are let go of."""

import re
from pathlib import Path

import jax
import numpy as np

from paged.models.host_memory import drop_pages, empty_array

LARGE = (5 << 20,)


def test_jax_keeps_large_arrays_as_they_are() -> None:
    array = empty_array(LARGE, np.dtype(np.uint8))
    array[:] = 7
    kept = jax.device_put(array, jax.devices("cpu")[0])
    assert kept.unsafe_buffer_pointer() == array.ctypes.data
    assert empty_array((2, 3), np.dtype(np.int16)).shape == (2, 3)


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssFile:\s+(\d+)", status)[1])


def test_pages_of_a_file_are_dropped_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(0).integers(0, 256, LARGE, np.uint8)
    content.tofile(path)
    view = np.memmap(path, np.uint8, mode="r").view(np.ndarray)[100:]
    assert view.sum() == content[100:].sum()
    before = resident_file_bytes()
    drop_pages(view)
    assert before - resident_file_bytes() > 4 << 20
    np.testing.assert_array_equal(view, content[100:])


def test_memory_that_is_of_no_file_is_left_alone() -> None:
    array = empty_array(LARGE, np.dtype(np.uint8))
    array[:] = 7
    drop_pages(array)
    drop_pages(np.ones(3))
    assert (array == 7).all()
