"""Ragged paged attention in plain XLA: the reference of every kernel, and the portable backend.

Two walks over the context, both in chunks with an online softmax, both ending where the *live*
context ends, so that the width of the block tables costs nothing:

- sequences with one query row (decodes) go together, one row of the batch each;
- longer queries are cut into tiles of rows, and each tile walks its own context alone, which
  keeps its scores in the processor's cache and skips what causality hides.

Source: PagedAttention, arXiv:2309.06180; online softmax, arXiv:2205.14135.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

# Tokens of context per iteration. All decodes of a batch walk in step, so that a longer chunk
# wastes more on the shorter contexts; a tile has fewer to waste.
_DECODE_CHUNK_TOKENS = 256
_TILE_CHUNK_TOKENS = 256
_TILE_ROWS = 64
# Finite, so that a row without any visible key gives no NaN.
_MASKED = -1e30

type _SoftmaxState = tuple[Array, Array, Array]
"""Running maximum and sum per query row, and the weighted values, all float32."""


def unsupported(head_dim: int, block_size: int, dtype: str) -> str | None:
    """Return why this backend cannot serve such a cache; it always can."""
    del head_dim, block_size, dtype
    return None


@dataclass(frozen=True, slots=True)
class _Context:
    """The cache as both walks see it."""

    # One row per (block, key or value, kv head): a gather gives what a product reads.
    heads: Array  # [num_blocks * 2 * num_kv_heads, block_size, head_dim]
    num_kv_heads: int
    sliding_window: int | None
    soft_cap: float | None

    def gather(self, blocks: Array, key_or_value: int) -> Array:
        """Return float32 `[..., num_kv_heads, chunk, head_dim]` of blocks `[..., num_blocks]`."""
        head = jnp.arange(self.num_kv_heads, dtype=jnp.int32)[:, None]
        index = (blocks * 2 + key_or_value)[..., None, :] * self.num_kv_heads + head
        found = self.heads.at[index].get(mode="promise_in_bounds")
        *batch, num_blocks, block_size, head_dim = found.shape
        return found.reshape(*batch, num_blocks * block_size, head_dim).astype(jnp.float32)

    def fold(self, state: _SoftmaxState, q: Array, blocks: Array, mask: Array) -> _SoftmaxState:
        """Fold one chunk of context into the softmax.

        Args:
          state: maximum and sum `[..., num_kv_heads, rows]`, values `[..., rows, head_dim]`.
          q: scaled float32 `[..., num_kv_heads, rows, head_dim]`.
          blocks: `[..., num_blocks]`.
          mask: which keys each row sees, `[..., rows or 1, chunk]`.
        """
        best, total, mixed = state
        keys, values = self.gather(blocks, 0), self.gather(blocks, 1)
        scores = jnp.einsum("...rh,...ch->...rc", q, keys, precision="highest")
        if self.soft_cap is not None:
            cap = jnp.float32(self.soft_cap)
            scores = cap * jnp.tanh(scores / cap)
        mask = mask[..., None, :, :]
        # Replaced, not added to: a slot that nobody wrote may hold anything, NaN included.
        scores = jnp.where(mask, scores, _MASKED)
        seen_by_any = mask.any(axis=-2)[..., None]
        values = jnp.where(seen_by_any, values, 0.0)

        new_best = jnp.maximum(best, scores.max(axis=-1))
        # A row that has seen no key yet has the maximum _MASKED, where exp(0) would be a weight.
        weights = jnp.where(mask, jnp.exp(scores - new_best[..., None]), 0.0)
        shrink = jnp.exp(best - new_best)
        update = jnp.einsum("...rc,...ch->...rh", weights, values, precision="highest")
        return (
            new_best,
            total * shrink + weights.sum(axis=-1),
            mixed * shrink[..., None] + update,
        )

    def mask(self, keys: Array, queries: Array, valid: Array) -> Array:
        """Return which key positions `[..., 1, chunk]` the query positions `[..., rows, 1]` see."""
        seen = (keys <= queries) & valid
        if self.sliding_window is not None:
            seen &= keys > queries - self.sliding_window
        return seen

    def first_chunk(self, nearest_query: Array, chunk: int) -> Array:
        """Return the first chunk that a query at `nearest_query`, or after it, can see."""
        if self.sliding_window is None:
            return jnp.int32(0)
        return jnp.maximum(nearest_query - self.sliding_window + 1, 0) // chunk


def attend(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Array:
    """Return the attention of `ragged_paged_attention`; arguments are checked there."""
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    context = _Context(
        kv_cache.reshape(-1, block_size, head_dim), num_kv_heads, sliding_window, soft_cap
    )
    # [num_tokens, num_kv_heads, group, head_dim]: the q heads of one kv head are neighbours.
    grouped = q.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32)
    grouped = grouped * jnp.float32(scale)
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    out = jnp.zeros_like(grouped)
    if num_tokens <= num_seqs:
        # A decode step: nearly every sequence has one row, so that every row may go alone.
        row = jnp.arange(num_tokens, dtype=jnp.int32)
        seq = _owner(ends, row)
        position = row + (seq_lens - ends)[seq]
        rows = _Rows(row, position, row < ends[-1])
        out = _attend_rows(out, grouped, context, block_tables[seq], rows)
        return out.reshape(q.shape).astype(q.dtype)
    rows = _Rows(starts, seq_lens - 1, ends - starts == 1)
    out = _attend_rows(out, grouped, context, block_tables, rows)
    out = _attend_tiles(out, grouped, context, block_tables, seq_lens, starts, ends)
    return out.reshape(q.shape).astype(q.dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Single query rows, each with a context of its own; the three arrays are `[num_rows]`."""

    row: Array
    position: Array
    valid: Array


def _attend_rows(
    out: Array, grouped: Array, context: _Context, tables: Array, rows: _Rows
) -> Array:
    """Write the attention of single rows into `out`; `tables` is `[num_rows, max_blocks]`."""
    block_size = context.heads.shape[1]
    tables, blocks_per_chunk = _padded(tables, _DECODE_CHUNK_TOKENS, block_size)
    chunk = blocks_per_chunk * block_size
    num_tokens = grouped.shape[0]
    q = grouped[jnp.clip(rows.row, 0, num_tokens - 1)]  # [num_rows, kv_heads, group, head_dim]
    queries = rows.position[:, None, None]
    valid = rows.valid[:, None, None]

    def step(number: Array, state: _SoftmaxState) -> _SoftmaxState:
        blocks = jax.lax.dynamic_slice_in_dim(
            tables, number * blocks_per_chunk, blocks_per_chunk, axis=1
        )
        keys = number * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, None, :]
        return context.fold(state, q, blocks, context.mask(keys, queries, valid))

    last = jnp.where(rows.valid, rows.position, -1).max()
    nearest = jnp.where(rows.valid, rows.position, jnp.iinfo(jnp.int32).max).min()
    mixed = _walk(step, q, context.first_chunk(nearest, chunk), (last + chunk) // chunk)
    target = jnp.where(rows.valid, rows.row, num_tokens)
    return out.at[target].set(mixed, mode="drop")


def _attend_tiles(
    out: Array,
    grouped: Array,
    context: _Context,
    block_tables: Array,
    seq_lens: Array,
    starts: Array,
    ends: Array,
) -> Array:
    """Write the attention of every sequence with several query rows into `out`, tile by tile."""
    num_tokens, num_kv_heads, group, head_dim = grouped.shape
    block_size = context.heads.shape[1]
    tables, blocks_per_chunk = _padded(block_tables, _TILE_CHUNK_TOKENS, block_size)
    chunk = blocks_per_chunk * block_size
    tile_rows = min(_TILE_ROWS, num_tokens)
    lengths = ends - starts
    tiles_of_seq = jnp.where(lengths > 1, (lengths + tile_rows - 1) // tile_rows, 0)
    tile_ends = jnp.cumsum(tiles_of_seq, dtype=jnp.int32)

    def tile(number: Array, out: Array) -> Array:
        seq = _owner(tile_ends, number)
        nth = number - (tile_ends[seq] - tiles_of_seq[seq])
        row = starts[seq] + nth * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
        valid = row < ends[seq]
        position = row + seq_lens[seq] - ends[seq]
        q = grouped[jnp.clip(row, 0, num_tokens - 1)]
        q = q.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * tile_rows, head_dim)

        def step(number: Array, state: _SoftmaxState) -> _SoftmaxState:
            first = number * blocks_per_chunk
            blocks = jax.lax.dynamic_slice(tables, (seq, first), (1, blocks_per_chunk))[0]
            keys = number * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, :]
            mask = context.mask(keys, position[:, None], valid[:, None])
            return context.fold(state, q, blocks, jnp.tile(mask, (group, 1)))

        end_chunk = (jnp.where(valid, position, -1).max() + chunk) // chunk
        mixed = _walk(step, q, context.first_chunk(position[0], chunk), end_chunk)
        mixed = mixed.reshape(num_kv_heads, group, tile_rows, head_dim).transpose(2, 0, 1, 3)
        return out.at[jnp.where(valid, row, num_tokens)].set(mixed, mode="drop")

    return jax.lax.fori_loop(0, tile_ends[-1], tile, out)


def _walk(
    step: Callable[[Array, _SoftmaxState], _SoftmaxState], q: Array, first: Array, end: Array
) -> Array:
    """Run `step` over chunks `first:end`; return the normalised mix, zero where nothing is seen."""
    start = (
        jnp.full(q.shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    _, total, mixed = jax.lax.fori_loop(first, end, step, start)
    return mixed / jnp.where(total == 0, 1.0, total)[..., None]


def _owner(ends: Array, item: Array) -> Array:
    """Return which of the consecutive ranges ending at `ends` holds each item, clipped."""
    owner = jnp.searchsorted(ends, item, side="right").astype(jnp.int32)
    return jnp.minimum(owner, ends.shape[0] - 1)


def _padded(tables: Array, chunk_tokens: int, block_size: int) -> tuple[Array, int]:
    """Return the block tables padded to whole chunks, and the blocks per chunk.

    A slice that ran over the edge would be clamped, which shifts every block in it.
    """
    blocks_per_chunk = max(1, chunk_tokens // block_size)
    padding = -tables.shape[1] % blocks_per_chunk
    return jnp.pad(tables, ((0, 0), (0, padding))), blocks_per_chunk
