"""What the kernel is compiled for: the static side of a call, and how it is cut into tiles."""

import dataclasses

# Rows that one warpgroup multiplies: the M of wgmma.
TILE_ROWS = 64

# Warpgroups that compute; one more loads.
COMPUTE_WARPGROUPS = 2

# Rows of a swizzle pattern in shared memory: what a tile can be cut into, and a TMA load of part
# of an array has to start at a multiple of.
ROW_UNIT = 8

# Keys of a tile, at most.
MAX_TILE_KEYS = 128

# Columns of the output that a warpgroup hands to TMA at a time.
_MAX_STORE_COLUMNS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """How q heads that share a kv head share a tile.

    A tile of 64 rows is made of slabs: `num_tokens` consecutive query rows of one head each. A slab
    is what one TMA load brings, and heads of any number find room.

    Attributes:
      num_heads: q heads of a tile; divides the group.
      num_tokens: query rows of a slab, a power of two and a multiple of `ROW_UNIT`.
    """

    num_heads: int
    num_tokens: int

    @property
    def rows_per_item(self) -> int:
        """Query rows that the warpgroups of a program take together."""
        return COMPUTE_WARPGROUPS * self.num_tokens


def fold(group: int) -> Folding:
    """Return how `group` q heads per kv head are folded."""
    most = TILE_ROWS // ROW_UNIT
    num_heads = max(n for n in range(1, most + 1) if group % n == 0)
    return Folding(num_heads, 1 << ((TILE_ROWS // num_heads).bit_length() - 1))


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Constants of the attention kernel.

    Attributes:
      num_q_heads, num_kv_heads, head_dim, block_size: shape of queries and cache.
      scale, sliding_window, soft_cap: as in `ragged_paged_attention`.
      num_programs: programs that share the work.
      num_stages: tiles of keys and values that are being loaded or in use at a time.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    num_programs: int
    num_stages: int = 2

    @property
    def folding(self) -> Folding:
        """What the rows of a tile are."""
        return fold(self.num_q_heads // self.num_kv_heads)

    @property
    def num_head_tiles(self) -> int:
        """Tiles that cover all q heads of the same query rows."""
        return self.num_q_heads // self.folding.num_heads

    @property
    def tiles_per_kv_head(self) -> int:
        """Tiles of the same query rows that read the same kv head."""
        return self.num_head_tiles // self.num_kv_heads

    @property
    def tile_keys(self) -> int:
        """Keys of a tile.

        128 keys of 128 dimensions, keys and values in two stages, take 128 KB of the 227; with the
        queries (32 KB) and the output (32 KB) that is what fits. At 256 dimensions the scores of
        64 keys are what the registers have room for beside the output.
        """
        return MAX_TILE_KEYS if self.head_dim <= 128 else 64

    @property
    def copy_keys(self) -> int:
        """Keys that one TMA load brings: those of a block, or of a tile where that is less."""
        return min(self.block_size, self.tile_keys)

    @property
    def copies_per_tile(self) -> int:
        """TMA loads that fill a tile."""
        return self.tile_keys // self.copy_keys

    @property
    def store_columns(self) -> int:
        """Columns of the output that leave through shared memory at a time."""
        return min(self.head_dim, _MAX_STORE_COLUMNS)
