"""Which tokens min-p, top-k and top-p leave to the draw.

The answer is a floor: the smallest logit that stays. Nearly always it is among the 64 largest
logits of a row, which one short sort gives; the rows where it is not are searched one at a time,
in the caches of one core, so one flat distribution costs its batch mates nothing.

Source: top-p, arXiv:1904.09751; min-p, arXiv:2407.01082.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged.models.batch import SamplingBatch
from paged.models.token_blocks import take_blocks

# Blocks looked at first. A vocabulary of 49152 has 768 blocks, and 64 of them are 4096 candidates.
_CANDIDATE_BLOCKS = 64


class _Limits(NamedTuple):
    """What each row allows, `[num_rows, 1]`."""

    top_k: Array
    top_p: Array
    floor: Array  # the smallest logit that min-p leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Logits:
    """The logits of each row, and the few of them among which a threshold mostly lies."""

    blocks: Array  # [num_rows, num_blocks, 64]
    block: Array  # [num_rows, up to 64] the blocks with the largest maxima, in order of id
    candidates: Array  # [num_rows, up to 4096] their logits
    cut: Array  # [num_rows, 1] all logits above it are candidates
    peak: Array  # [num_rows, 1] the largest
    inverse_temperature: Array  # [num_rows, 1]

    @property
    def everything(self) -> Array:
        """All logits, `[num_rows, num_blocks * 64]`."""
        return self.blocks.reshape(self.blocks.shape[0], -1)

    def weigh(self, values: Array, floor: Array) -> Array:
        """Return probabilities of logits relative to the best one's, 0 below `floor`."""
        weights = jnp.exp((values - self.peak) * self.inverse_temperature)
        return jnp.where(values >= floor, weights, 0.0)

    def masses(self, values: Array, floor: Array) -> Array:
        """Return the sum of `weigh` for each block of `values` `[num_rows, n * 64]`."""
        weights = self.weigh(values, floor)
        return weights.reshape(*weights.shape[:1], -1, self.blocks.shape[2]).sum(axis=2)


def truncate(
    blocks: Array, best: Array, inverse_temperature: Array, batch: SamplingBatch
) -> tuple[Array, Array]:
    """Return what min-p, top-k and top-p, in this order, leave of each row.

    Args:
      blocks: float32 `[num_seqs, num_blocks, 64]`, the logits.
      best: `[num_seqs, num_blocks]`, the largest of each block.
      inverse_temperature: `[num_seqs, 1]`.
      batch: parameters by row; those of rows without a temperature are ignored.

    Returns:
      The mass of the tokens that stay, by block, `[num_seqs, num_blocks]`, relative to the
      best token; and their smallest logit, `[num_seqs, 1]`. Ties at it stay, and so does the best.
    """
    peak = best.max(axis=1, keepdims=True)
    everything = blocks.reshape(blocks.shape[0], -1)
    # A probability of min_p times the best one's, in logits; log(0) excludes nothing.
    floor = peak + jnp.log(batch.min_p[:, None]) / inverse_temperature
    weights = jnp.exp((everything - peak) * inverse_temperature)
    weights = jnp.where(everything >= floor, weights, 0.0)
    mass = weights.reshape(blocks.shape).sum(axis=2)
    is_truncated = ((batch.top_k > 0) | (batch.top_p < 1)) & (batch.temperature > 0)
    limits = _Limits(batch.top_k[:, None], batch.top_p[:, None], floor)

    def search() -> tuple[Array, Array]:
        logits = _choose_candidates(blocks, best, peak, inverse_temperature)
        floor, is_found = _floor_among_largest(logits, limits, mass)
        row = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
        masses = logits.masses(logits.candidates, floor)
        found = jnp.zeros_like(mass).at[row, logits.block].set(masses, unique_indices=True)
        result = jnp.where(is_truncated[:, None], found, mass), floor
        return _search_rows(logits, limits, is_truncated & ~is_found, result)

    result: tuple[Array, Array] = lax.cond(is_truncated.any(), search, lambda: (mass, floor))
    return result


def _choose_candidates(
    blocks: Array, best: Array, peak: Array, inverse_temperature: Array
) -> _Logits:
    num_candidates = min(_CANDIDATE_BLOCKS, best.shape[1])
    block_best, block = lax.top_k(best, num_candidates)
    is_all = num_candidates == best.shape[1]
    cut = jnp.full_like(peak, -jnp.inf) if is_all else block_best[:, -1:]
    block = jnp.sort(block, axis=1)
    return _Logits(blocks, block, take_blocks(blocks, block), cut, peak, inverse_temperature)


def _floor_among_largest(logits: _Logits, limits: _Limits, mass: Array) -> tuple[Array, Array]:
    """Return the floor of each row, `[num_rows, 1]`, and whether it is right, `[num_rows]`.

    It is where it lies above the smallest of the sorted logits: no other reaches it then.

    Args:
      logits, limits: of all rows.
      mass: what min-p leaves of each block, `[num_rows, num_blocks]`.
    """
    # Each candidate block offers its maximum, so they hold as many of the largest logits.
    count = logits.block.shape[1]
    largest = lax.top_k(logits.candidates, count)[0]
    last = largest[:, -1:]
    top_k, top_p, floor = limits
    kth = jnp.take_along_axis(largest, jnp.clip(top_k - 1, 0, count - 1), axis=1)
    floor = jnp.maximum(floor, jnp.where(top_k > 0, kth, -jnp.inf))
    is_found = top_k < count

    weights = logits.weigh(largest, floor)
    # What top-k leaves is among the largest if its floor is above the last of them.
    total = jnp.where(top_k > 0, weights.sum(1, keepdims=True), mass.sum(1, keepdims=True))
    is_found &= (top_k <= 0) | (floor > last) | (top_p >= 1)
    is_below = jnp.cumsum(weights, axis=1) < top_p * total
    num_below = is_below.sum(axis=1, keepdims=True, dtype=jnp.int32)
    is_found &= (num_below < count) | (top_p >= 1)
    nucleus = jnp.take_along_axis(largest, jnp.minimum(num_below, count - 1), axis=1)
    floor = jnp.maximum(floor, jnp.where(top_p < 1, nucleus, -jnp.inf))
    return floor, (is_found & (floor > last))[:, 0]


def _search_rows(
    logits: _Logits, limits: _Limits, is_searched: Array, result: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return `result`, masses and floors, with the rows `is_searched` worked out."""

    def search(i: Array, result: tuple[Array, Array]) -> tuple[Array, Array]:
        def row[T](tree: T) -> T:
            taken: T = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1), tree)
            return taken

        one, limit = row(logits), row(limits)
        floor = jnp.maximum(limit.floor, _top_k_floor(one, limit.top_k))
        floor = jnp.maximum(floor, _top_p_floor(one, limit.top_p, floor))
        found = one.masses(one.everything, floor), floor
        masses, floors = (
            lax.dynamic_update_slice_in_dim(x, y, i, 0) for x, y in zip(result, found, strict=True)
        )
        return masses, floors

    def visit(i: Array, result: tuple[Array, Array]) -> tuple[Array, Array]:
        visited: tuple[Array, Array]
        visited = lax.cond(is_searched[i], search, lambda _, result: result, i, result)
        return visited

    searched: tuple[Array, Array] = lax.fori_loop(0, is_searched.shape[0], visit, result)
    return searched


def _top_k_floor(logits: _Logits, top_k: Array) -> Array:
    """Return the k-th largest logit of each row with a top-k, -inf in the others."""
    top_k = jnp.minimum(top_k, logits.everything.shape[1])
    is_used = top_k > 0

    def kth_largest(values: Array, low: Array) -> Array:
        def holds(threshold: Array) -> Array:
            return (values >= threshold).sum(axis=1, keepdims=True, dtype=jnp.int32) >= top_k

        return _largest_threshold(low, jnp.where(is_used, logits.peak, low), holds)

    floor = lax.cond(
        (top_k <= logits.block.shape[1]).all(),
        lambda: kth_largest(logits.candidates, logits.cut),
        lambda: kth_largest(logits.everything, jnp.full_like(logits.peak, -jnp.inf)),
    )
    return jnp.where(is_used, floor, -jnp.inf)


def _top_p_floor(logits: _Logits, top_p: Array, floor: Array) -> Array:
    """Return the smallest logit of the top-p set of each row with a top-p, -inf in the others.

    It is the smallest set of the largest logits at or above `floor` that holds a share `top_p`
    of their probability.
    """
    is_used = top_p < 1
    target = top_p * logits.weigh(logits.everything, floor).sum(axis=1, keepdims=True)

    def smallest(values: Array, low: Array) -> Array:
        weights = logits.weigh(values, floor)

        def holds(threshold: Array) -> Array:
            return _sum_where(values >= threshold, weights) >= target

        return _largest_threshold(low, jnp.where(is_used, logits.peak, low), holds)

    weights = logits.weigh(logits.candidates, floor)
    is_near = _sum_where(logits.candidates > logits.cut, weights) >= target
    found = lax.cond(
        (is_near | ~is_used).all(),
        lambda: smallest(logits.candidates, logits.cut),
        lambda: smallest(logits.everything, floor),
    )
    return jnp.where(is_used, found, -jnp.inf)


def _sum_where(mask: Array, values: Array) -> Array:
    return jnp.where(mask, values, 0.0).sum(axis=1, keepdims=True)


def _largest_threshold(low: Array, high: Array, holds: Callable[[Array], Array]) -> Array:
    """Return the largest float in `[low, high]` of each row for which `holds`, `low` if none.

    Bisects on the order-preserving integer view of float32, at most 32 rounds, so the result is
    exact. `holds` maps `[num_seqs, 1]` to booleans and must not become true again as it grows.
    """

    def is_open(bounds: tuple[Array, Array]) -> Array:
        return (bounds[0] < bounds[1]).any()

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        is_held = holds(_from_ordered(middle))
        return jnp.where(is_held, middle, low), jnp.where(is_held, high, middle - 1)

    bounds = (_to_ordered(low), _to_ordered(high))
    return _from_ordered(lax.while_loop(is_open, halve, bounds)[0])


def _to_ordered(values: Array) -> Array:
    """Return int32s that compare as the float32 values do."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(ordered: Array) -> Array:
    bits = jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return lax.bitcast_convert_type(bits, jnp.float32)
