"""How large tiles are: by head size, dtype and GPU, from what the compiler makes of them.

docs/gpu_kernels.md has registers, spills and shared memory of what is chosen here, and
docs/decisions/0028 the reasons.
"""

import dataclasses

from paged.triton.spec import next_power_of_2


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """How the attention kernel is cut.

    Attributes:
      wide_keys, narrow_keys: keys of a tile of several query rows, and of one.
      wide_slices: programs among which the rows of a wide tile are cut.
      num_warps: of a program.
      num_stages: tiles of keys and values that are being loaded or in use at a time.
    """

    wide_keys: int
    narrow_keys: int
    wide_slices: int
    num_warps: int
    num_stages: int


def choose_tiles(
    *, head_dim: int, is_float32: bool, tile_rows: int | None, compute_capability: int
) -> Tiles:
    """Return the tiles of a call.

    Args:
      head_dim: head size.
      is_float32: whether products are of float32, in three parts each.
      tile_rows: rows (of q heads) of the plan's wide tiles; None: it has none.
      compute_capability: of the GPU, as in sm_90: 90.
    """
    width = next_power_of_2(head_dim)
    is_ampere = compute_capability < 90
    narrow_keys = 32 if is_float32 or width > 128 else 64
    if tile_rows is None:
        return Tiles(narrow_keys, narrow_keys, 1, num_warps=4, num_stages=3)
    if is_float32:
        return Tiles(32, 32, max(tile_rows // 32, 1), num_warps=4, num_stages=2)
    if width > 128:
        # Before sm_90 operands of a product pass through registers: half as many rows then.
        return Tiles(32, 32, 2 if is_ampere else 1, num_warps=8, num_stages=2)
    wide_keys = 32 if is_ampere and width > 64 else 64
    return Tiles(wide_keys, narrow_keys, 1, num_warps=8 if tile_rows > 64 else 4, num_stages=3)
