"""Pairs of a row and an expert, sorted into groups, and a loop over blocks of a group.

What `jax.lax.ragged_dot` promises without what it does: XLA:CPU lowers it, and JAX's default for
GPUs does, to a dense product with all experts (docs/decisions/0033). Here the number of
multiplications follows the groups, and weights of an expert with an empty group are not touched.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 8, 256


class ExpertPairs(NamedTuple):
    """All pairs of a row and one of its experts, in the order of experts.

    Attributes:
      rows: int32 `[num_pairs]`, the row of each pair.
      group_ends: int32 `[num_experts]`, where the group of each expert ends; it begins where the
        one before it ends. Pairs after the last group belong to padding or to nobody here.
      places: int32 `[num_rows, num_chosen]`, where each pair is.
      is_computed: bool `[num_rows, num_chosen]`, whether it is in a group.
    """

    rows: Array
    group_ends: Array
    places: Array
    is_computed: Array


def sort_pairs(chosen: Array, num_rows: Array, num_experts: int) -> ExpertPairs:
    """Return the pairs of rows and experts, sorted by expert and, within one, by row.

    Args:
      chosen: int32 `[num_rows, num_chosen]`, the experts of each row. A number outside of
        `[0, num_experts)` is in no group.
      num_rows: int32 `[1]`; rows from it on are padding, and in no group.
      num_experts: how many groups there are.
    """
    is_row = jnp.arange(chosen.shape[0])[:, None] < num_rows[None]
    is_computed = is_row & (chosen >= 0) & (chosen < num_experts)
    experts = jnp.where(is_computed, chosen, num_experts).reshape(-1)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    sizes = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
    return ExpertPairs(
        order // chosen.shape[1], jnp.cumsum(sizes), places.reshape(chosen.shape), is_computed
    )


def map_groups(
    compute: Callable[[Array, Array], Array], x: Array, group_ends: Array, *, num_outputs: int
) -> Array:
    """Return `compute(expert, rows)` of each group of rows, `[num_pairs, num_outputs]`.

    Each group is cut into blocks of one size, and a loop runs over the blocks that there are, so
    `compute` is traced once. Rows after the last group are zero.

    Args:
      compute: from an int32 `[]` and `[block_rows, num_inputs]` to `[block_rows, num_outputs]` of
        x's type. Rows of a block that are not the expert's are thrown away.
      x: `[num_pairs, num_inputs]`, sorted by expert.
      group_ends: int32 `[num_experts]`, see `ExpertPairs`.
      num_outputs: width of the result.
    """
    num_pairs, _ = x.shape
    block_rows = _block_rows(num_pairs, len(group_ends))
    # So that no block reaches over the end, where a slice would be moved back.
    x = jnp.pad(x, ((0, block_rows), (0, 0)))
    group_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), group_ends[:-1]])
    block_ends = jnp.cumsum(-((group_starts - group_ends) // block_rows))
    block_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), block_ends[:-1]])

    def add_block(block: Array, results: Array) -> Array:
        expert = jnp.searchsorted(block_ends, block, side="right", method="compare_all")
        first = group_starts[expert] + (block - block_starts[expert]) * block_rows
        block_x = lax.dynamic_slice_in_dim(x, first, block_rows)
        values = compute(expert, block_x)
        before = lax.dynamic_slice_in_dim(results, first, block_rows)
        is_own = first + jnp.arange(block_rows) < group_ends[expert]
        kept = jnp.where(is_own[:, None], values, before)
        return lax.dynamic_update_slice_in_dim(results, kept, first, 0)

    nothing = jnp.zeros((num_pairs + block_rows, num_outputs), x.dtype)
    results: Array = lax.fori_loop(jnp.int32(0), block_ends[-1], add_block, nothing)
    return results[:num_pairs]


def _block_rows(num_pairs: int, num_experts: int) -> int:
    """Return half of what an expert has on average, a power of two.

    Each expert's last block is half empty on average: a fourth of the rows, then. Smaller blocks
    would waste less of them, and read the expert's weights again more often.
    """
    half = max(num_pairs // num_experts // 2, 1)
    return min(max(1 << (half - 1).bit_length(), _MIN_BLOCK_ROWS), _MAX_BLOCK_ROWS)
