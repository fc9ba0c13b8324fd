"""What kernels are compiled for: the static side of a call, as one constant each."""

import dataclasses


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Constants of the attention kernel.

    Attributes:
      num_q_heads, num_kv_heads, head_dim, block_size: shape of queries and cache.
      table_width: blocks in a row of the block tables.
      scale, sliding_window, soft_cap: as in `ragged_paged_attention`.
      has_kv_scales, has_sinks: whether those arrays are given.
      is_e4m3: whether the cache holds float8 e4m3, else it has the dtype of the queries.
      decodes_bytes: whether e4m3 is decoded by bit operations, for GPUs that lack the type.
      precision: how products of float32 are computed, Triton's name for it.
      wide_rows, wide_keys: rows (of q heads) and keys of a tile of several query rows, or of the
        slice of one that a program takes.
      narrow_rows, narrow_keys: rows and keys of a tile of one query row.
      num_wide_items: items before this index are wide tiles, the others narrow ones.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    table_width: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_kv_scales: bool
    has_sinks: bool
    is_e4m3: bool
    decodes_bytes: bool
    precision: str
    wide_rows: int
    wide_keys: int
    narrow_rows: int
    narrow_keys: int
    num_wide_items: int

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """Width of a tile: `head_dim`, or the next power of two."""
        return next_power_of_2(self.head_dim)

    @property
    def values_offset(self) -> int:
        """Elements between a key and its value."""
        return self.num_kv_heads * self.block_size * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True)
class CombineSpec:
    """Constants of the combine kernel.

    Attributes:
      num_q_heads, num_kv_heads, head_dim: shape of the queries and heads of the cache.
      rows: rows of a partial result.
      chunk: partial results that are read at once.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int
    chunk: int

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """Width of a tile: `head_dim`, or the next power of two."""
        return next_power_of_2(self.head_dim)


@dataclasses.dataclass(frozen=True, slots=True)
class WriteSpec:
    """Constants of the kernel that writes keys and values.

    Attributes:
      num_blocks, num_kv_heads, block_size, head_dim: shape of the cache.
      has_kv_scales: whether that array is given.
      is_e4m3: whether the cache holds float8 e4m3.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    has_kv_scales: bool
    is_e4m3: bool

    @property
    def num_slots(self) -> int:
        """Slots of the cache."""
        return self.num_blocks * self.block_size

    @property
    def padded_heads(self) -> int:
        """`num_kv_heads`, or the next power of two."""
        return next_power_of_2(self.num_kv_heads)

    @property
    def padded_dim(self) -> int:
        """`head_dim`, or the next power of two."""
        return next_power_of_2(self.head_dim)

    @property
    def values_offset(self) -> int:
        """Elements between a key and its value."""
        return self.num_kv_heads * self.block_size * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True)
class Int4ProductSpec:
    """Constants of the product with a weight of 4-bit integers.

    Attributes:
      num_rows, num_inputs, num_outputs: shape of the product.
      group_size: inputs that share a scale.
      has_zeros: whether zero points are given.
      tile_rows, tile_outputs: what a program computes.
      num_splits: programs among which the groups of a tile are cut.
    """

    num_rows: int
    num_inputs: int
    num_outputs: int
    group_size: int
    has_zeros: bool
    tile_rows: int
    tile_outputs: int
    num_splits: int

    @property
    def num_groups(self) -> int:
        """Groups of inputs."""
        return self.num_inputs // self.group_size

    @property
    def half_group(self) -> int:
        """Bytes of a group of one output."""
        return self.group_size // 2

    @property
    def groups_per_split(self) -> int:
        """Groups that a program sums over."""
        return self.num_groups // self.num_splits


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertProductSpec:
    """Constants of the product of groups of rows with weights of experts.

    Attributes:
      num_experts, num_inputs, num_outputs: shape of the weights.
      has_bias: whether that array is given.
      tile_rows, tile_outputs, tile_inputs: what a program computes, and of how many inputs at a
        time.
    """

    num_experts: int
    num_inputs: int
    num_outputs: int
    has_bias: bool
    tile_rows: int
    tile_outputs: int
    tile_inputs: int
