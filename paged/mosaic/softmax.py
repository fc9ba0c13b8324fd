"""The arithmetic of the online softmax, whatever multiplies: logits are to base 2."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.refs import Inputs
from paged.mosaic.schedule import Work, divide, divide_up
from paged.mosaic.spec import AttentionSpec

# Stands for minus infinity where the difference of two must not be NaN.
_MASKED = -1e30
_LOG2_E = math.log2(math.e)


def open_tiles(work: Work, spec: AttentionSpec) -> tuple[Array, Array]:
    """Return the first and the end of the tiles whose keys all rows see, so without a mask.

    Those before them have left the window of the last rows, those behind them are still to come
    for the first rows.
    """
    start = jnp.int32(0)
    if spec.sliding_window is not None:
        last_position = work.high + work.offset - 1
        num_left = last_position - (spec.sliding_window - 1) - work.origin
        start = jnp.minimum(divide_up(jnp.maximum(num_left, 0), spec.tile_keys), work.num_tiles)
    first_position = work.low + work.offset
    num_open = divide(jnp.maximum(first_position + 1 - work.origin, 0), spec.tile_keys)
    return start, jnp.maximum(jnp.minimum(num_open, work.num_tiles), start)


def first_sums(inputs: Inputs, work: Work, spec: AttentionSpec, by_row: Any) -> tuple[Array, Array]:
    """Return the largest logit and the sum of weights of no keys, or of each row's sink."""
    sinks, folding, shape = inputs.sinks, spec.folding, (spec.tile_rows,)
    total = jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32)
    largest = plgpu.layout_cast(jnp.full(shape, _MASKED, jnp.float32), by_row)
    if sinks is not None:
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=by_row)
        for head in range(folding.num_heads):
            sink = sinks[work.first_head + head].astype(jnp.float32) * _LOG2_E
            largest = jnp.where(row >= head * folding.num_tokens, sink, largest)
    return largest, plgpu.layout_cast(total, by_row)


def cap(products: Array, key_scale: Array, spec: AttentionSpec) -> tuple[Array, Array]:
    """Return scores, which a mask applies to, and the factor that makes logits of them."""
    factor = key_scale * (spec.scale * _LOG2_E)
    if spec.soft_cap is None:
        return products, factor
    # cap tanh(x) = cap (1 - 2 / (exp(2 x) + 1)), all in base 2.
    power = jnp.exp2(products * (factor * (2.0 / spec.soft_cap)))
    return spec.soft_cap * (1.0 - 2.0 / (power + 1.0)), jnp.float32(_LOG2_E)


def mask(
    scores: Array,
    column: Array,
    work: Work,
    first_key: Array,
    spec: AttentionSpec,
    by_row: Any,
) -> Array:
    """Return the scores with those of keys that a row does not see far below all others.

    Args:
      scores: `[tile_rows, tile_keys]`.
      column: index of each column, of the same shape.
      work: whose rows they are, this warpgroup's among them.
      first_key: key of the first column.
      spec: constants.
      by_row: layout of one number for each row.
    """
    num_tokens = spec.folding.num_tokens
    row = plgpu.broadcasted_iota(jnp.int32, (spec.tile_rows,), 0, layout=by_row)
    token = lax.axis_index("warpgroup") * num_tokens + (row & (num_tokens - 1))
    last = token + (work.row + work.offset - first_key)
    last = lax.broadcast_in_dim(last, scores.shape, [0])
    is_seen = column <= last
    if spec.sliding_window is not None:
        is_seen &= column > last - spec.sliding_window
    return jnp.where(is_seen, scores, _MASKED)


def fold(
    scores: Array, factor: Array, largest: Array, total: Array
) -> tuple[Array, Array, Array, Array]:
    """Return a tile's weights, what earlier sums decay by, the largest logit and the new total."""
    larger = jnp.maximum(largest, scores.max(axis=1) * factor)
    # Until a row meets its first key its weights are 1 on masked ones; the decay wipes them.
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(larger, scores.shape, [0]))
    decay = jnp.exp2(largest - larger)
    return weights, decay, larger, total * decay + weights.sum(axis=1)


def scale_of(inputs: Inputs, kind: int, work: Work) -> Array:
    """Return what cached keys (0) or values (1) are multiplied by."""
    return jnp.float32(1.0) if inputs.kv_scales is None else inputs.kv_scales[kind, work.kv_head]


def normalize(weighted: Array, total: Array, inputs: Inputs, work: Work) -> Array:
    """Return the output of rows from their weighted sums of values and sums of weights."""
    share = scale_of(inputs, 1, work) / jnp.where(total == 0.0, 1.0, total)
    return weighted * lax.broadcast_in_dim(share, weighted.shape, [0])
