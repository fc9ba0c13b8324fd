"""What the kernel is compiled for: the static side of a call, and how it is cut into tiles."""

import dataclasses

# Rows that one warpgroup multiplies: the M of wgmma.
TILE_ROWS = 64

# Warpgroups that compute; one more loads.
COMPUTE_WARPGROUPS = 2

# Rows of a slab in shared memory are whole rows of its 8-row swizzle atoms.
_SLAB_UNIT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """How q heads that share a kv head share a tile.

    A tile of 64 rows has `num_heads` slabs, each of `num_tokens` consecutive query rows of one
    head. Heads are then what one box of a TMA load has, wherever the sequence starts.

    Attributes:
      num_heads: q heads of a tile; divides the group.
      num_tokens: query rows of a slab, a power of two.
    """

    num_heads: int
    num_tokens: int

    @property
    def rows_per_item(self) -> int:
        """Query rows that the warpgroups of a program take together."""
        return COMPUTE_WARPGROUPS * self.num_tokens


def fold(group: int) -> Folding:
    """Return how `group` q heads per kv head are folded."""
    most = TILE_ROWS // _SLAB_UNIT
    num_heads = max(n for n in range(1, most + 1) if group % n == 0)
    return Folding(num_heads, 1 << ((TILE_ROWS // num_heads).bit_length() - 1))


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Constants of the attention kernel.

    Attributes:
      num_q_heads, num_kv_heads, head_dim, block_size: shape of queries and cache.
      scale, sliding_window, soft_cap: as in `ragged_paged_attention`.
      folding: the tiles' rows.
      tile_keys: keys of a tile.
      num_stages: tiles of keys and values that are being loaded or in use at a time.
      num_programs: programs that share the work.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    folding: Folding
    tile_keys: int
    num_stages: int
    num_programs: int

    @property
    def num_head_tiles(self) -> int:
        """Tiles that cover all q heads of the same query rows."""
        return self.num_q_heads // self.folding.num_heads

    @property
    def tiles_per_kv_head(self) -> int:
        """Tiles that read the same kv head."""
        return self.num_head_tiles // self.num_kv_heads

    @property
    def blocks_per_tile(self) -> int:
        """Blocks of a tile of keys."""
        return self.tile_keys // self.block_size
