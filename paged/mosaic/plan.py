"""Which query rows and which keys are worked on together: the items of a step.

Made once per step by XLA and shared by all layers. Rows are cut where a multiple of the rows of an
item lies on the token axis, not where a sequence starts, because a TMA load of queries has to start
at a multiple of 8 rows. So sequences that meet within a tile have an item each, with the same rows
and other keys, and each writes its own rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from paged.mosaic.spec import MAX_TILE_KEYS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work of the attention kernel; all arrays int32.

    Attributes:
      items: `[num_items, 8]`, longest first: first query row of the tile, first and end of the rows
        that are the sequence's own, what to add to a row to get its position, sequence, first key,
        end of the keys that the rows see, context length.
      num_live: `[1]`, items that are in use.
      block_tables: `[num_seqs, max_blocks_per_seq]`.
      columns: `[128]`, 0, 1, 2, ...; the kernel says why it needs them.
    """

    items: Array
    num_live: Array
    block_tables: Array
    columns: Array


def make_plan(
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    num_tokens: int,
    rows_per_item: int,
    sliding_window: int | None,
) -> AttentionPlan:
    """Return the items of a batch.

    Args:
      block_tables, seq_lens, query_start_loc, sliding_window: as in `ragged_paged_attention`.
      num_tokens: query rows, those of padding included.
      rows_per_item: query rows of a tile.
    """
    num_seqs = block_tables.shape[0]
    # Rows behind the last sequence are one more, without keys: their items write zeros.
    bounds = jnp.append(query_start_loc, jnp.int32(num_tokens))
    starts, ends = bounds[:-1], bounds[1:]
    contexts = jnp.append(seq_lens, jnp.int32(0))
    first_tiles = starts // rows_per_item
    counts = jnp.where(ends > starts, (ends - 1) // rows_per_item + 1 - first_tiles, 0)
    item_ends = jnp.cumsum(counts, dtype=jnp.int32)
    num_live = item_ends[-1:]

    # Each sequence but the first may share the tile that it starts in.
    item = jnp.arange(-(-num_tokens // rows_per_item) + num_seqs, dtype=jnp.int32)
    seq = jnp.searchsorted(item_ends, item, side="right", method="compare_all").astype(jnp.int32)
    seq = jnp.minimum(seq, num_seqs)
    row = (first_tiles[seq] + item - (item_ends - counts)[seq]) * rows_per_item
    low = jnp.maximum(row, starts[seq])
    high = jnp.minimum(row + rows_per_item, ends[seq])
    offset = (contexts - ends)[seq]
    first_key = jnp.zeros_like(item)
    if sliding_window is not None:
        first_key = jnp.maximum(low + offset - (sliding_window - 1), 0)
    end_key = jnp.maximum(high + offset, first_key)
    fields = [row, low, high, offset, jnp.minimum(seq, num_seqs - 1), first_key, end_key]
    items = jnp.stack([*fields, contexts[seq]], axis=1)
    num_keys = jnp.where(item < num_live, end_key - first_key, -1)
    items = items[jnp.argsort(num_keys, descending=True)]
    columns = jnp.arange(MAX_TILE_KEYS, dtype=jnp.int32)
    return AttentionPlan(items, num_live, block_tables, columns)
