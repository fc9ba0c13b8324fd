"""Rows of a tile to the output, and only those that are the sequence's own."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.schedule import Work
from paged.mosaic.spec import AttentionSpec


def store(
    rows: Callable[[int, int], Array], output: Any, shared: Any, work: Work, spec: AttentionSpec
) -> None:
    """Write this warpgroup's rows through its half of shared memory.

    Returns before they have arrived. A slab that is all the sequence's own leaves at once, one
    that is shared with another sequence row by row.

    Args:
      rows: returns columns of them, from the first to the end, `[tile_rows, columns]` float32.
      output: reference to the kernel's output.
      shared: `[2, tile_rows, store_columns]`.
      work: whose rows they are.
      spec: constants.
    """
    folding = spec.folding
    warpgroup = lax.axis_index("warpgroup")
    mine = shared.at[warpgroup]
    first_row = work.row + warpgroup * folding.num_tokens
    low = jnp.clip(work.low - first_row, 0, folding.num_tokens)
    high = jnp.clip(work.high - first_row, 0, folding.num_tokens)
    is_whole = high - low == folding.num_tokens

    for column in range(0, spec.head_dim, spec.store_columns):
        columns = pl.ds(column, spec.store_columns)
        # What left before must have been read.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mine[...] = rows(column, column + spec.store_columns).astype(output.dtype)
        plgpu.commit_smem()
        for slab in range(folding.num_heads):
            head, first = work.first_head + slab, slab * folding.num_tokens

            @pl.when(is_whole)
            def _(head: Array = head, first: int = first, columns: Any = columns) -> None:
                plgpu.copy_smem_to_gmem(
                    mine.at[pl.ds(first, folding.num_tokens)],
                    output.at[pl.ds(first_row, folding.num_tokens), head, columns],
                )

            @pl.when(~is_whole)
            def _(head: Array = head, first: int = first, columns: Any = columns) -> None:
                @pl.loop(low, high)
                def _(row: Array) -> None:
                    plgpu.copy_smem_to_gmem(
                        mine.at[pl.ds(first + row, 1)],
                        output.at[pl.ds(first_row + row, 1), head, columns],
                    )
