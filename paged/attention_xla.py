"""Ragged paged attention in plain XLA: runs everywhere, and is what other backends are held to.

Query rows are cut into tiles of at most `tile_size` rows of one sequence, so K and V are gathered
once per tile and not once per row. Two nested loops with traced bounds visit what is live: groups
of tiles, and for each group the chunks of context that its rows can see, with an online softmax.
Sequences with a single row (decodes) take a pass of their own with tiles of one row, because in a
tile of 64 they would cost 64 times the arithmetic.

Which rows form which tile is the same for every layer: `plan` works it out once per step, and the
loops only slice what it left. That is less about run time than about compile time, since XLA
compiles every layer's loops anew: planning inside them doubles it (docs/decisions/0012).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged.attention_call import AttentionCall

# Timings of the constants below: one layer of SmolLM2 (9 q heads, 3 kv heads, head_dim 64, block
# 16) on 2 cores of a Zen 5 server, CPU milliseconds of one core.

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
_PREFILL_GROUP = 1

# Not -inf: a row whose first chunk is wholly masked would compute -inf - -inf = NaN.
_MASKED = -0.7 * float(np.finfo(np.float32).max)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "rows",
        "positions",
        "first_keys",
        "end_keys",
        "pages",
        "first_chunk",
        "end_chunk",
        "num_groups",
        "output_rows",
        "is_owned",
    ),
    meta_fields=("tile_size", "chunk_blocks"),
)
@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """The tiles of one pass over the queries, by group; integers are int32.

    A tile past the last live one, and a row that its tile does not own, have position -1 and see
    no key.
    """

    rows: Array  # [num_groups, group_size * tile_size] rows of q, clipped into range
    positions: Array  # [num_groups, group_size, tile_size * q heads per kv head]
    first_keys: Array  # [num_groups, group_size] keys that any row of the tile sees: from here
    end_keys: Array  # [num_groups, group_size] to here
    pages: Array  # [num_groups, group_size, max_blocks] row of a block in the cache as a matrix
    first_chunk: Array  # [num_groups] chunks of context that the group visits: from here
    end_chunk: Array  # [num_groups] to here
    num_groups: Array  # [] live groups
    output_rows: Array  # [num_tokens] decode tiles: row of the pass's output for a row of q
    is_owned: Array  # [num_tokens] whether the pass computes a row of q
    tile_size: int
    chunk_blocks: int


type AttentionPlan = tuple[_Pass, ...]
"""What `attend` needs to know of a batch beside its queries and the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    kv_scales: Array | None  # [planes, num_kv_heads]
    sinks: Array | None  # [num_q_heads]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Softmax:
    """An online softmax in progress; float32."""

    maximum: Array  # [G, K, R] largest score so far
    total: Array  # [G, K, R] sum of the weights exp(score - maximum)
    weighted: Array  # [G, K, R, H] values summed with those weights


def unsupported(call: AttentionCall) -> str | None:
    """Return why `attend` cannot serve a call: it serves all, so None."""
    del call
    return None


def plan(
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    num_planes: int,
    block_size: int,
    sliding_window: int | None,
) -> AttentionPlan:
    """Return the tiles of a batch, as `paged.attention.plan_attention` documents."""
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    # Rows without a context, malformed or padding, take part in nothing.
    query_lens = jnp.where(seq_lens > 0, query_lens, 0)
    plan_pass = functools.partial(
        _plan_pass,
        block_tables,
        seq_lens,
        query_start_loc,
        num_tokens=num_tokens,
        q_heads_per_kv_head=num_q_heads // num_kv_heads,
        rows_per_block=num_planes * num_kv_heads,
        block_size=block_size,
        sliding_window=sliding_window,
    )
    num_seqs = seq_lens.shape[0]
    if num_tokens <= num_seqs:
        # A decode bucket: one tile per row is exact, and right even if a sequence has several.
        return (plan_pass(query_lens, tile_size=1, max_tiles=num_tokens),)
    is_decode = query_lens == 1
    tile_size = min(_TILE_ROWS, num_tokens)
    # Every sequence may end with a tile of a single row.
    max_tiles = (num_tokens + num_seqs * (tile_size - 1)) // tile_size
    return (
        plan_pass(jnp.where(is_decode, query_lens, 0), tile_size=1, max_tiles=num_seqs),
        plan_pass(
            jnp.where(is_decode, 0, query_lens),
            tile_size=tile_size,
            max_tiles=min(max_tiles, num_tokens),
        ),
    )


# Jitted, although always called inside a jit: the layers of a model then share one trace, which
# takes 0.1 s instead of 2 s for the 30 layers of SmolLM2.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def attend(
    q: Array,
    kv_cache: Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Array | None,
    sinks: Array | None,
) -> Array:
    """Return the attention that `paged.attention.ragged_paged_attention` documents."""
    options = _Options(scale, sliding_window, soft_cap, kv_scales, sinks)
    # Each row is zero in a pass that does not compute it.
    return functools.reduce(
        jnp.add, (_attend_pass(q, kv_cache, one_pass, options) for one_pass in plan)
    )


def _plan_pass(
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    query_lens: Array,
    *,
    tile_size: int,
    max_tiles: int,
    num_tokens: int,
    q_heads_per_kv_head: int,
    rows_per_block: int,
    block_size: int,
    sliding_window: int | None,
) -> _Pass:
    """Return the tiles of the sequences with `query_lens > 0`."""
    group_size = min(_DECODE_GROUP, max_tiles) if tile_size == 1 else _PREFILL_GROUP
    max_tiles = -(-max_tiles // group_size) * group_size
    tiles_per_seq = (query_lens + tile_size - 1) // tile_size
    last_tiles = jnp.cumsum(tiles_per_seq, dtype=jnp.int32)
    first_tiles = last_tiles - tiles_per_seq

    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    seq = jnp.minimum(_count_at_or_below(last_tiles, tile), seq_lens.shape[0] - 1)
    offset = (tile - first_tiles[seq]) * tile_size
    is_live = tile < last_tiles[-1]
    num_rows = jnp.where(is_live, jnp.minimum(query_lens[seq] - offset, tile_size), 0)
    first_row = query_start_loc[seq] + offset
    first_position = seq_lens[seq] - (query_start_loc[seq + 1] - query_start_loc[seq]) + offset

    lane = jnp.arange(tile_size, dtype=jnp.int32)[None, :]
    is_row = lane < num_rows[:, None]
    rows = jnp.clip(first_row[:, None] + lane, 0, num_tokens - 1)
    positions = jnp.where(is_row, first_position[:, None] + lane, -1)
    # What some row of the tile sees; blocks that left the window may be anyone's by now.
    window = np.iinfo(np.int32).max if sliding_window is None else sliding_window
    first_keys = jnp.maximum(0, first_position - (window - 1))
    first_keys = jnp.where(is_live, first_keys, np.iinfo(np.int32).max)
    end_keys = jnp.where(is_live, first_position + num_rows, 0)

    chunk_blocks = max(1, min(_CHUNK_TOKENS // block_size, block_tables.shape[1]))
    chunk_size = chunk_blocks * block_size
    # Whole chunks: a slice over the edge would be clamped, which shifts every block in it.
    padding = -block_tables.shape[1] % chunk_blocks
    tables = jnp.pad(block_tables, ((0, 0), (0, padding)))[seq]

    def by_group(array: Array) -> Array:
        return array.reshape(-1, group_size, *array.shape[1:])

    row = jnp.arange(num_tokens, dtype=jnp.int32)
    row_seq = jnp.maximum(_count_at_or_below(query_start_loc[:-1], row) - 1, 0)
    row_offset = row - query_start_loc[row_seq]
    return _Pass(
        rows=by_group(rows).reshape(-1, group_size * tile_size),
        positions=by_group(jnp.repeat(positions, q_heads_per_kv_head, axis=1)),
        first_keys=by_group(first_keys),
        end_keys=by_group(end_keys),
        pages=by_group(tables * rows_per_block),
        first_chunk=by_group(first_keys).min(axis=1) // chunk_size,
        end_chunk=(by_group(end_keys).max(axis=1) + chunk_size - 1) // chunk_size,
        num_groups=(last_tiles[-1] + group_size - 1) // group_size,
        output_rows=jnp.clip(first_tiles[row_seq] * tile_size + row_offset, 0, rows.size - 1),
        is_owned=row_offset < query_lens[row_seq],
        tile_size=tile_size,
        chunk_blocks=chunk_blocks,
    )


def _attend_pass(q: Array, kv_cache: Array, tiles: _Pass, options: _Options) -> Array:
    """Return attention of the rows that the pass owns, and zeros in the others."""
    rows_per_group = tiles.rows.shape[1]
    # A prefill tile goes to where its first row is: what it writes beyond its last row, zeros, is
    # overwritten by the tiles after it, which come in the order of their rows. Room for every
    # tile that there could be would be eight times the rows of q with many sequences.
    is_in_place = tiles.tile_size > 1
    num_rows = q.shape[0] + rows_per_group if is_in_place else tiles.rows.size

    def attend_group(group: Array, outputs: Array) -> Array:
        output = _attend_group(q, kv_cache, tiles, group, options)
        start = _index(tiles.rows, group)[0] if is_in_place else group * rows_per_group
        return lax.dynamic_update_slice_in_dim(
            outputs, output, start, axis=0, allow_negative_indices=False
        )

    outputs = jnp.zeros((num_rows, *q.shape[1:]), q.dtype)
    outputs = lax.fori_loop(0, tiles.num_groups, attend_group, outputs)
    outputs = outputs[: q.shape[0]] if is_in_place else _take(outputs, tiles.output_rows)
    return jnp.where(tiles.is_owned[:, None, None], outputs, jnp.zeros((), q.dtype))


def _attend_group(
    q: Array, kv_cache: Array, tiles: _Pass, group: Array, options: _Options
) -> Array:
    """Return the outputs of one group, `[group_size * tile_size, num_q_heads, head_dim]`."""
    # Axes: G tiles, K kv heads, R = tile_size * (q heads per kv head) rows, C keys, H head_dim.
    num_q_heads, head_dim = q.shape[1:]
    num_blocks, num_planes, num_kv_heads, block_size, _ = kv_cache.shape
    positions = _index(tiles.positions, group)[:, :, None]  # [G, R, 1]
    first_keys, end_keys = _index(tiles.first_keys, group), _index(tiles.end_keys, group)  # [G]
    pages = _index(tiles.pages, group)  # [G, max_blocks]
    split = (pages.shape[0], tiles.tile_size, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    dtype = _product_dtype(q, kv_cache, tiles.tile_size)
    queries = _take(q, _index(tiles.rows, group)).astype(dtype).reshape(split)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(split[0], num_kv_heads, -1, head_dim)
    # One row per (block, key or value, head): XLA:CPU gathers long rows of a matrix two to four
    # times as fast (8 GB/s a core) as slices of a higher rank, whose index it recomputes.
    matrix = kv_cache.reshape(num_blocks * num_planes * num_kv_heads, block_size * head_dim)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    chunk_size = tiles.chunk_blocks * block_size
    chunk_shape = (split[0], num_kv_heads, chunk_size, head_dim)

    def attend_chunk(chunk: Array, state: _Softmax) -> _Softmax:
        key = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)[None, :]  # [1, C]
        is_needed = key < end_keys[:, None]
        is_visible = key[:, None] <= positions
        if options.sliding_window is not None:
            is_needed &= key >= first_keys[:, None]
            is_visible &= key[:, None] > positions - options.sliding_window
        blocks = lax.dynamic_slice_in_dim(
            pages, chunk * tiles.chunk_blocks, tiles.chunk_blocks, 1, allow_negative_indices=False
        )
        rows = blocks[:, None, :] + heads  # [G, K, chunk_blocks]
        keys = _take(matrix, rows).astype(dtype).reshape(chunk_shape)
        values = keys
        if num_planes == 2:
            values = _take(matrix, rows + num_kv_heads).astype(dtype).reshape(chunk_shape)
        # Selected, not multiplied: weight zero times a stale NaN is NaN. Scores are selected too,
        # so keys need no cleaning.
        values = jnp.where(is_needed[:, None, :, None], values, jnp.zeros((), dtype))
        return _accumulate(queries, keys, values, is_visible, options, state)

    first_chunk, end_chunk = _index(tiles.first_chunk, group), _index(tiles.end_chunk, group)
    state = lax.fori_loop(first_chunk, end_chunk, attend_chunk, _empty_softmax(queries.shape))
    if options.sinks is not None:
        state = _add_sinks(state, options.sinks.reshape(num_kv_heads, -1))
    output = state.weighted / jnp.where(state.total == 0, 1.0, state.total)[..., None]
    if options.kv_scales is not None:
        output *= options.kv_scales[-1][None, :, None, None]
    output = output.astype(q.dtype).reshape(split[0], num_kv_heads, split[1], split[3], head_dim)
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
    if options.kv_scales is not None:
        scores *= options.kv_scales[0][None, :, None, None]
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


def _add_sinks(state: _Softmax, sinks: Array) -> _Softmax:
    """Add a key of value zero to every row, with the logit `sinks[kv head, q head of it]`."""
    num_tile_rows = state.maximum.shape[2] // sinks.shape[1]
    logits = jnp.tile(sinks.astype(jnp.float32), (1, num_tile_rows))[None]  # [1, K, R]
    maximum = jnp.maximum(state.maximum, logits)
    decay = jnp.exp(state.maximum - maximum)
    return _Softmax(
        maximum, state.total * decay + jnp.exp(logits - maximum), state.weighted * decay[..., None]
    )


def _materialise(array: Array) -> Array:
    """Keep XLA from computing `array` again for each of its consumers."""
    kept: Array = lax.optimization_barrier(array)  # type: ignore[no-untyped-call]
    return kept


# The indices of a plan are in range and never negative: saying so drops the operations that would
# wrap and clamp them, a quarter of all that XLA would have to compile.


def _index(array: Array, index: Array) -> Array:
    """Return `array[index]` for a scalar index."""
    entry: Array = lax.dynamic_index_in_dim(
        array, index, keepdims=False, allow_negative_indices=False
    )
    return entry


def _take(array: Array, rows: Array) -> Array:
    """Return `array[rows]`."""
    return array.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _count_at_or_below(ascending: Array, values: Array) -> Array:
    """Return how many entries of `ascending` are at or below each value."""
    return jnp.searchsorted(ascending, values, side="right", method="compare_all").astype(jnp.int32)
