"""The Mosaic kernels of a program, as their compiler writes them to a folder on request.

Mosaic compiles its kernels when XLA compiles the program, so the lowered program does not have
their code. The request is an environment variable, the only way there is.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

# Registers how Mosaic kernels are lowered, which a process that has a GPU does by itself.
import jax._src.pallas.mosaic_gpu.pallas_call_registration  # noqa: F401

from paged.gpu.ptx import Kernel, inspect

_FOLDER = "MOSAIC_GPU_DUMP_TO"
_BARRIER_BYTES = 8


@contextlib.contextmanager
def dumping_to(folder: pathlib.Path) -> Iterator[None]:
    """Have Mosaic write what it compiles meanwhile to a new folder."""
    folder.mkdir()
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before


def mosaic_kernels(folder: pathlib.Path) -> list[Kernel]:
    """Return the kernels in a folder, each once."""
    found: dict[str, Kernel] = {}
    for file in sorted(folder.glob("*.ptx")):
        code = file.read_text()
        if code not in found:
            name = re.sub(r"_\d+$", "", file.stem)
            resources = file.with_suffix(".resources.txt").read_text()
            found[code] = inspect(code, name, _shared_bytes(resources))
    return list(found.values())


def _shared_bytes(resources: str) -> int:
    """Return the shared memory of a program: its arrays and its barriers."""
    arrays = re.search(r"smem_scratch_bytes=(\d+)", resources)
    assert arrays is not None, "every kernel says so"
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    return int(arrays[1]) + _BARRIER_BYTES * sum(int(n) * int(count) for n, count in barriers)
