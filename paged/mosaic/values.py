"""Values that nobody may see: zeros in their place."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.refs import Shared
from paged.mosaic.schedule import Work
from paged.mosaic.spec import AttentionSpec

# Rows and columns that are in registers at a time, 16 of a thread: there is little room.
_PART = 64


def clean_values(
    shared: Shared, stage: Array, first_key: Array, work: Work, spec: AttentionSpec
) -> None:
    """Overwrite values of a tile from before the window and from behind the context.

    What lies there is nobody's and may be NaN, which a weight of zero would not stop. Both
    computing warpgroups must call this; one does it, both wait.
    """
    is_dirty = (first_key < work.first_key) | (first_key + spec.tile_keys > work.context)

    @pl.when(is_dirty)
    def _() -> None:
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _() -> None:
            layout, shape = plgpu.Layout.WGMMA, (_PART, _PART)
            for row in range(0, spec.tile_keys, _PART):
                key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + (first_key + row)
                is_seen = (key >= work.first_key) & (key < work.context)
                for column in range(0, spec.head_dim, _PART):
                    part = shared.v.at[stage, pl.ds(row, _PART), pl.ds(column, _PART)]
                    values = plgpu.layout_cast(part[...], layout)
                    part[...] = jnp.where(is_seen, values, jnp.zeros_like(values))
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.v_clean.at[stage])

        plgpu.barrier_wait(shared.v_clean.at[stage])
