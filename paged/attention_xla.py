"""Ragged paged attention in plain XLA: runs everywhere, and is what other backends are held to.

Query rows are cut into tiles of at most `tile_size` rows of one sequence, so K and V are gathered
once per tile and not once per row. Two nested loops with traced bounds visit what is live: groups
of tiles, and for each group the chunks of context that its rows can see, with an online softmax.
Sequences with a single row (decodes) take a pass of their own with tiles of one row, because in a
tile of 64 they would cost 64 times the arithmetic.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Timings of the constants below: one layer of SmolLM2 (9 q heads, 3 kv heads, head_dim 64, block
# 16) on 2 cores of a Zen 5 server, CPU milliseconds of one core, benchmark in the commit message.

# Tokens of context per loop iteration. 64 rows x 9 heads x 128 keys of float32 scores are 295 KB
# and stay in L2 (1 MB): a prefill of 1024 tokens takes 13.0 ms with 128, 15.4 with 256, 18.8 with
# 512. Decode is indifferent (3.2 ms at 64 sequences of 256, with 128 and with 256).
_CHUNK_TOKENS = 128

# Rows of a tile in the pass for sequences with several rows: 13.0 ms with 64 rows and 12.9 with
# 128, but half the waste at the end of a sequence, and 23 ms or more with 16.
_TILE_ROWS = 64

# Tiles per iteration of the outer loop: a decode tile is too small to pay for an iteration (0.60
# ms with 8, 0.88 with 4 at 16 sequences of 256), a tile of 64 rows is not.
_DECODE_GROUP = 8
_PREFILL_GROUP = 2

# Not -inf: a row whose first chunk is wholly masked would compute -inf - -inf = NaN.
_MASKED = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    sliding_window: int | None
    soft_cap: float | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """Runs of query rows, each of one sequence; arrays are `[num_tiles]` int32."""

    seq: Array  # sequence the tile belongs to
    first_row: Array  # row of q where it starts
    num_rows: Array  # rows it owns; 0 for a tile past the last live one
    first_position: Array  # position of its first row in the sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Softmax:
    """An online softmax in progress; float32."""

    maximum: Array  # [G, K, R] largest score so far
    total: Array  # [G, K, R] sum of the weights exp(score - maximum)
    weighted: Array  # [G, K, R, H] values summed with those weights


def unsupported(
    q: Array, kv_cache: Array, sliding_window: int | None, soft_cap: float | None
) -> str | None:
    """Return why `attend` cannot take these arguments: it takes all, so None."""
    del q, kv_cache, sliding_window, soft_cap
    return None


# Jitted, although always called inside a jit: the layers of a model then share one trace, which
# takes 0.1 s instead of 2 s for the 30 layers of SmolLM2.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
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
    """Return the attention that `paged.attention.ragged_paged_attention` documents."""
    options = _Options(scale, sliding_window, soft_cap)
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    attend_rows = functools.partial(
        _attend_rows, q, kv_cache, block_tables, seq_lens, query_start_loc, options=options
    )
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    # Rows without a context, malformed or padding, take part in nothing.
    query_lens = jnp.where(seq_lens > 0, query_lens, 0)
    if num_tokens <= num_seqs:
        # A decode bucket: one tile per row is exact, and right even if a sequence has several.
        return attend_rows(query_lens, tile_size=1)
    is_decode = query_lens == 1
    decoded = attend_rows(jnp.where(is_decode, query_lens, 0), tile_size=1)
    prefilled = attend_rows(
        jnp.where(is_decode, 0, query_lens), tile_size=min(_TILE_ROWS, num_tokens)
    )
    # Each row is zero in the pass that did not compute it.
    return decoded + prefilled


def _attend_rows(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    query_lens: Array,
    *,
    tile_size: int,
    options: _Options,
) -> Array:
    """Return attention for the sequences with `query_lens > 0`, and zeros in other rows."""
    num_tokens, num_q_heads, head_dim = q.shape
    group_size = _DECODE_GROUP if tile_size == 1 else _PREFILL_GROUP
    tiles_per_seq = -(-query_lens // tile_size)
    last_tiles = jnp.cumsum(tiles_per_seq, dtype=jnp.int32)
    first_tiles = last_tiles - tiles_per_seq
    # The most tiles there can be: every sequence may end with a tile of a single row.
    num_tiles = min(num_tokens, (num_tokens + seq_lens.shape[0] * (tile_size - 1)) // tile_size)
    num_tiles = -(-num_tiles // group_size) * group_size
    tiles = _map_tiles(
        num_tiles, tile_size, query_lens, query_start_loc, seq_lens, first_tiles, last_tiles
    )

    def attend_group(i: Array, outputs: Array) -> Array:
        group = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, i * group_size, group_size), tiles
        )
        output = _attend_tiles(q, kv_cache, block_tables, group, tile_size, options)
        return lax.dynamic_update_slice_in_dim(outputs, output, i * group_size * tile_size, axis=0)

    num_groups = -(-last_tiles[-1] // group_size)
    outputs = lax.fori_loop(
        0,
        num_groups,
        attend_group,
        jnp.zeros((num_tiles * tile_size, num_q_heads, head_dim), q.dtype),
    )
    rows = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = _last_at_or_below(query_start_loc[:-1], rows)
    offset = rows - query_start_loc[seq]
    outputs = outputs.at[first_tiles[seq] * tile_size + offset].get(mode="clip")
    return jnp.where((offset < query_lens[seq])[:, None, None], outputs, jnp.zeros((), q.dtype))


def _map_tiles(
    num_tiles: int,
    tile_size: int,
    query_lens: Array,
    query_start_loc: Array,
    seq_lens: Array,
    first_tiles: Array,
    last_tiles: Array,
) -> _Tiles:
    """Return which rows each of `num_tiles` tiles owns; tiles past the live ones own none."""
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = jnp.minimum(_count_at_or_below(last_tiles, tile), seq_lens.shape[0] - 1)
    offset = (tile - first_tiles[seq]) * tile_size
    is_live = tile < last_tiles[-1]
    num_rows = jnp.where(is_live, jnp.minimum(query_lens[seq] - offset, tile_size), 0)
    position = seq_lens[seq] - (query_start_loc[seq + 1] - query_start_loc[seq]) + offset
    return _Tiles(seq, query_start_loc[seq] + offset, num_rows, position)


def _attend_tiles(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    tiles: _Tiles,
    tile_size: int,
    options: _Options,
) -> Array:
    """Return the outputs of a group of tiles, `[group_size * tile_size, num_q_heads, head_dim]`."""
    # Axes: G tiles, K kv heads, R = tile_size * (q heads per kv head) rows, C keys, H head_dim.
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    grouped = (tiles.seq.shape[0], tile_size, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    dtype = _product_dtype(q, kv_cache, tile_size)
    lane = jnp.arange(tile_size, dtype=jnp.int32)
    rows = (tiles.first_row[:, None] + lane).reshape(-1)
    queries = q.at[rows].get(mode="clip").astype(dtype).reshape(grouped).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(grouped[0], num_kv_heads, -1, head_dim)  # [G, K, R, H]
    positions = tiles.first_position[:, None] + lane
    positions = jnp.where(lane < tiles.num_rows[:, None], positions, -1)  # -1 sees no key
    positions = jnp.repeat(positions, grouped[3], axis=1)  # [G, R]
    context_lens = jnp.where(tiles.num_rows > 0, tiles.first_position + tiles.num_rows, 0)
    first_needed = _first_needed(tiles, options.sliding_window)
    tables = block_tables[tiles.seq]
    blocks_per_chunk = max(1, min(_CHUNK_TOKENS // block_size, block_tables.shape[1]))
    chunk_size = blocks_per_chunk * block_size

    def attend_chunk(chunk: Array, state: _Softmax) -> _Softmax:
        key_positions = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)
        # What some row of the tile sees; blocks that left the window may be anyone's by now.
        is_needed = (key_positions >= first_needed[:, None]) & (
            key_positions < context_lens[:, None]
        )
        is_visible = key_positions <= positions[:, :, None]
        if options.sliding_window is not None:
            is_visible &= key_positions > positions[:, :, None] - options.sliding_window
        columns = chunk * blocks_per_chunk + jnp.arange(blocks_per_chunk, dtype=jnp.int32)
        blocks = tables.at[:, columns].get(mode="clip")
        keys, values = _gather_blocks(kv_cache, blocks, is_needed, dtype)
        return _accumulate(queries, keys, values, is_visible, options, state)

    first_chunk = first_needed.min() // chunk_size
    num_chunks = -(-context_lens.max() // chunk_size)
    state = lax.fori_loop(first_chunk, num_chunks, attend_chunk, _empty_softmax(queries.shape))
    output = state.weighted / jnp.where(state.total == 0, 1.0, state.total)[..., None]
    output = output.astype(q.dtype).reshape(-1, num_kv_heads, tile_size, *grouped[3:])
    flat: Array = output.transpose(0, 2, 1, 3, 4).reshape(-1, num_q_heads, head_dim)
    return flat


def _product_dtype(q: Array, kv_cache: Array, tile_size: int) -> np.dtype[Any]:
    """Return the dtype in which queries meet keys, and weights meet values."""
    # XLA:CPU multiplies bfloat16 tiles 1.5x as fast as float32 ones, but for a single row the
    # cast of K and V to float32, fused into their gather, wins (2.9 against 4.3 ms at 16
    # sequences of 1024). It has no fast float16.
    is_bfloat16 = all(array.dtype == jnp.bfloat16 for array in (q, kv_cache))
    dtype: np.dtype[Any] = jnp.dtype(jnp.bfloat16 if is_bfloat16 and tile_size > 1 else jnp.float32)
    return dtype


def _first_needed(tiles: _Tiles, sliding_window: int | None) -> Array:
    """Return the first position that any row of each tile sees; the last int32 for no rows."""
    window = np.iinfo(np.int32).max if sliding_window is None else sliding_window
    first = jnp.maximum(0, tiles.first_position - (window - 1))
    return jnp.where(tiles.num_rows > 0, first, np.iinfo(np.int32).max)


def _gather_blocks(
    kv_cache: Array, blocks: Array, is_needed: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return the keys and values in `blocks` `[G, n]`, each `[G, K, n * block_size, H]`."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    # One row per (block, key or value, head): XLA:CPU gathers long rows of a matrix two to four
    # times as fast (8 GB/s a core) as slices of a higher rank, whose index it recomputes.
    matrix = kv_cache.reshape(num_blocks * 2 * num_kv_heads, block_size * head_dim)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    rows = blocks[:, None, :] * (2 * num_kv_heads) + heads[None, :, None]  # [G, K, n]
    shape = (*rows.shape[:2], rows.shape[2] * block_size, head_dim)
    keys = matrix.at[rows].get(mode="clip").astype(dtype).reshape(shape)
    values = matrix.at[rows + num_kv_heads].get(mode="clip").astype(dtype).reshape(shape)
    # Selected, not multiplied: weight zero times a stale NaN is NaN. Scores are selected too, so
    # keys need no cleaning.
    return keys, jnp.where(is_needed[:, None, :, None], values, jnp.zeros((), dtype))


def _empty_softmax(shape: tuple[int, ...]) -> _Softmax:
    rows = shape[:-1]
    return _Softmax(
        jnp.full(rows, _MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _accumulate(
    queries: Array,
    keys: Array,
    values: Array,
    is_visible: Array,
    options: _Options,
    state: _Softmax,
) -> _Softmax:
    """Fold one chunk of keys into the softmax; arXiv:2205.14135."""
    dot = functools.partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = dot("GKRH,GKCH->GKRC", queries, keys) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = _materialise(jnp.where(is_visible[:, None], scores, _MASKED))
    maximum = jnp.maximum(state.maximum, scores.max(axis=-1))
    # Until a row meets its first visible key its weights are exp(0) = 1 on masked keys; the
    # decay at that first key, exp(_MASKED - score) = 0, wipes them.
    decay = jnp.exp(state.maximum - maximum)
    weights = _materialise(jnp.exp(scores - maximum[..., None]))
    update = dot("GKRC,GKCH->GKRH", weights.astype(values.dtype), values)
    return _Softmax(
        maximum,
        state.total * decay + weights.sum(axis=-1),
        state.weighted * decay[..., None] + update,
    )


def _materialise(array: Array) -> Array:
    """Keep XLA from computing `array` again for each of its consumers."""
    kept: Array = lax.optimization_barrier(array)  # type: ignore[no-untyped-call]
    return kept


def _count_at_or_below(ascending: Array, values: Array) -> Array:
    """Return how many entries of `ascending` are at or below each value."""
    return jnp.searchsorted(ascending, values, side="right", method="compare_all").astype(jnp.int32)


def _last_at_or_below(ascending: Array, values: Array) -> Array:
    """Return the index of the last entry at or below each value, or 0 if there is none."""
    return jnp.maximum(_count_at_or_below(ascending, values) - 1, 0)
