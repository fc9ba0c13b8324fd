"""What the kernel is compiled for: the static side of a call, and how it is cut into tiles."""

import dataclasses

# Rows that one warpgroup multiplies, by what does it.
WGMMA_ROWS, TCGEN05_ROWS = 64, 128

# Warpgroups that compute; one more loads.
COMPUTE_WARPGROUPS = 2

# Rows of a swizzle pattern in shared memory: what a tile can be cut into, and a TMA load of part
# of an array has to start at a multiple of.
ROW_UNIT = 8

# Keys of a tile, at most.
MAX_TILE_KEYS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """How q heads that share a kv head share a tile.

    A tile is made of slabs: `num_tokens` consecutive query rows of one head each. A slab
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


def fold(group: int, tile_rows: int) -> Folding:
    """Return how `group` q heads per kv head are folded into tiles of so many rows."""
    most = tile_rows // ROW_UNIT
    num_heads = max(n for n in range(1, most + 1) if group % n == 0)
    return Folding(num_heads, 1 << ((tile_rows // num_heads).bit_length() - 1))


def tile_rows_of(compute_capability: int) -> int:
    """Return the rows of a tile on a GPU, which tell what multiplies them."""
    return WGMMA_ROWS if compute_capability < 100 else TCGEN05_ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Constants of the attention kernel.

    Attributes:
      num_q_heads, num_kv_heads, head_dim, block_size: shape of queries and cache.
      scale, sliding_window, soft_cap: as in `ragged_paged_attention`.
      num_programs: programs that share the work.
      tile_rows: rows that a warpgroup multiplies: 64 by wgmma, 128 by tcgen05.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    num_programs: int
    tile_rows: int

    @property
    def is_blackwell(self) -> bool:
        """Whether tcgen05 multiplies."""
        return self.tile_rows == TCGEN05_ROWS

    @property
    def folding(self) -> Folding:
        """What the rows of a tile are."""
        return fold(self.num_q_heads // self.num_kv_heads, self.tile_rows)

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

        Hopper: 128 keys of 128 dimensions, keys and values in two stages, take 128 KB of the 227;
        with the queries (32 KB) and the output (32 KB) that is what fits. At 256 dimensions the
        scores of 64 keys are what the registers have room for beside the output. Blackwell: of 512
        columns of tensor memory 256 are for the output at 128 dimensions, and 64 keys take 192.
        """
        return MAX_TILE_KEYS if self.head_dim <= 128 and not self.is_blackwell else 64

    @property
    def num_stages(self) -> int:
        """Tiles of keys and values that are being loaded or in use at a time."""
        return 3 if self.is_blackwell else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that loads.

        2 x 128 threads and 128 share 65,536; each choice is the one that spills nothing.
        """
        return (224, 56) if self.head_dim <= 64 and not self.is_blackwell else (232, 40)

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
        return 64 if self.is_blackwell else min(self.head_dim, 128)
