"""Which program works on which query rows and which keys: the items of a step.

Made once per step by XLA and shared by all layers. A program then finds its work with one load
instead of a search over the query starts, which would be a chain of loads in every program of
every layer. The number of items is static, those in use are not: programs of the rest return at
once. The longest items of a sequence come first, so that the hardware, which hands out programs
in order, does not start the longest last.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from paged.triton.spec import next_power_of_2

# Keys of a part are a multiple of this, whatever tile of keys a kernel has.
PART_UNIT = 128

# A part of fewer keys costs more to start and to combine than it saves: 256 keys of 128 bfloat16
# are 131 KB, 3.6 microseconds at one multiprocessor's share of an H200's bandwidth.
_MIN_PART = 256

# Rows (of q heads) of a wide tile: what one wgmma of two warpgroups, or one tcgen05, multiplies.
# With few rows in a batch, narrower tiles leave more programs.
_WIDE_ROWS = 128
_FEW_ROWS = 1024

# Rows that a tensor core multiplies at least.
_MIN_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work of the attention kernels; all arrays int32.

    Attributes:
      items: `[num_items, 8]`: first query row, query rows (0: nothing to do), position of the first
        row, sequence, first key, end of the keys, part (-1: all keys of its tile), 0.
      tiles: `[num_narrow_tiles, 4]`: index of the first narrow item, items, query row, 0.
      block_tables: `[num_seqs, max_blocks_per_seq]`.
      num_wide_items: items before this index have up to `rows_per_wide_tile` query rows, the others
        one.
      rows_per_wide_tile: query rows.
      has_parts: whether a tile may have several items.
    """

    items: Array
    tiles: Array
    block_tables: Array
    num_wide_items: int = dataclasses.field(metadata={"static": True})
    rows_per_wide_tile: int = dataclasses.field(metadata={"static": True})
    has_parts: bool = dataclasses.field(metadata={"static": True})


def make_plan(
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    num_tokens: int,
    group: int,
    block_size: int,
    sliding_window: int | None,
    wanted_items: int,
    min_part: int = _MIN_PART,
) -> AttentionPlan:
    """Return the items of a batch.

    Args:
      block_tables, seq_lens, query_start_loc: as in `ragged_paged_attention`.
      num_tokens: query rows, those of padding included.
      group: q heads per kv head.
      block_size: tokens of a block.
      sliding_window: as in `ragged_paged_attention`.
      wanted_items: decodes are cut into about so many items.
      min_part: keys of a part, at least.
    """
    num_seqs, table_width = block_tables.shape
    longest = table_width * block_size
    if sliding_window is not None:
        longest = min(longest, sliding_window)
    has_parts = longest > min_part and wanted_items > 1
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    # Rows behind the last sequence are one more sequence without keys: its programs write zeros.
    num_padding = num_tokens - query_start_loc[-1]
    batch = _Batch(
        jnp.append(seq_lens, jnp.zeros((), jnp.int32)),
        query_start_loc,
        jnp.append(query_lens, num_padding),
        sliding_window,
    )
    rows_per_wide_tile = _rows_per_wide_tile(num_tokens, group)
    if num_tokens <= num_seqs or rows_per_wide_tile == 1:
        # A decode bucket: every row is a tile.
        is_narrow, num_narrow_tiles, num_wide_items = None, num_tokens, 0
    else:
        is_narrow = batch.query_lens == 1
        num_narrow_tiles = num_seqs + 1
        # Every sequence may end with a tile of few rows.
        num_wide_items = min(num_tokens // rows_per_wide_tile + num_seqs + 1, num_tokens)

    narrow = batch if is_narrow is None else batch.only(is_narrow)
    num_narrow_items = num_narrow_tiles + (wanted_items if has_parts else 0)
    parts = _num_parts(narrow, wanted_items, min_part) if has_parts else None
    narrow_items, first_items = _items(narrow, 1, parts, num_narrow_items)
    tiles = _tiles(narrow, parts, first_items, num_narrow_tiles)
    if is_narrow is None:
        items = narrow_items
    else:
        wide = batch.only(~is_narrow)
        wide_items, _ = _items(wide, rows_per_wide_tile, None, num_wide_items)
        items = jnp.concatenate([wide_items, narrow_items])
    return AttentionPlan(items, tiles, block_tables, num_wide_items, rows_per_wide_tile, has_parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences; the last one is the padding."""

    seq_lens: Array  # [num_seqs + 1]
    starts: Array  # [num_seqs + 1] first query row
    query_lens: Array  # [num_seqs + 1]
    sliding_window: int | None

    def only(self, is_member: Array) -> "_Batch":
        """Return the batch with no rows in the other sequences."""
        return dataclasses.replace(self, query_lens=jnp.where(is_member, self.query_lens, 0))


def _rows_per_wide_tile(num_tokens: int, group: int) -> int:
    rows = _WIDE_ROWS if num_tokens * group >= _FEW_ROWS else _WIDE_ROWS // 2
    return max(rows, next_power_of_2(group)) // group


def _num_parts(batch: _Batch, wanted_items: int, min_part: int) -> Array:
    """Return into how many parts each sequence's keys are cut, `[num_seqs + 1]`.

    Parts are of about one size over all sequences, so that a long one among short ones gets many.
    """
    keys = batch.seq_lens
    if batch.sliding_window is not None:
        keys = jnp.minimum(keys, batch.sliding_window)
    total = jnp.sum(keys.astype(jnp.float32) * batch.query_lens.astype(jnp.float32))
    wanted = jnp.ceil(total / (wanted_items * PART_UNIT)).astype(jnp.int32) * PART_UNIT
    part = jnp.maximum(wanted, min_part)
    return jnp.maximum((keys + part - 1) // part, 1)


def _items(
    batch: _Batch, rows_per_tile: int, parts: Array | None, num_items: int
) -> tuple[Array, Array]:
    """Return the items of a batch, `[num_items, 8]`, and the first one of each sequence."""
    num_tiles = (batch.query_lens + rows_per_tile - 1) // rows_per_tile
    num_parts = jnp.ones_like(num_tiles) if parts is None else parts
    counts = num_tiles * num_parts
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(num_items, dtype=jnp.int32)
    seq = _owner(ends, item)
    index = item - (ends - counts)[seq]
    # The last rows of a sequence see most keys.
    tile = num_tiles[seq] - 1 - index // num_parts[seq]
    part = index % num_parts[seq]

    first_row = tile * rows_per_tile
    num_rows = jnp.minimum(batch.query_lens[seq] - first_row, rows_per_tile)
    position = batch.seq_lens[seq] - batch.query_lens[seq] + first_row
    first_key = jnp.zeros_like(item)
    if batch.sliding_window is not None:
        first_key = jnp.maximum(position - (batch.sliding_window - 1), 0)
    end_key = jnp.maximum(position + num_rows, first_key)
    part_keys = -(-(end_key - first_key) // (num_parts[seq] * PART_UNIT)) * PART_UNIT
    part_start = jnp.minimum(first_key + part * part_keys, end_key)
    fields = [
        batch.starts[seq] + first_row,
        jnp.where(item < ends[-1], num_rows, 0),
        position,
        seq,
        part_start,
        jnp.minimum(part_start + part_keys, end_key),
        jnp.where(num_parts[seq] == 1, -1, part),
        jnp.zeros_like(item),
    ]
    return jnp.stack(fields, axis=1), ends - counts


def _tiles(batch: _Batch, parts: Array | None, first_items: Array, num_tiles: int) -> Array:
    """Return for each tile of one row which items hold its parts, `[num_tiles, 4]`."""
    num_parts = jnp.ones_like(first_items) if parts is None else parts
    ends = jnp.cumsum(batch.query_lens, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = _owner(ends, tile)
    row = tile - (ends - batch.query_lens)[seq]
    # `_items` goes through a sequence backwards.
    first_item = first_items[seq] + (batch.query_lens[seq] - 1 - row) * num_parts[seq]
    count = jnp.where(tile < ends[-1], num_parts[seq], 0)
    return jnp.stack([first_item, count, batch.starts[seq] + row, jnp.zeros_like(tile)], axis=1)


def _owner(ends: Array, index: Array) -> Array:
    """Return which of the ranges that end at `ends` holds each index; the last if none does."""
    owner = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(owner, ends.shape[0] - 1)
