"""The computing warpgroups on Blackwell: tcgen05, with sums in tensor memory.

A thread has a row of its tile. Products run beside it: while a warpgroup does its softmax, the
tensor cores have its weighted sum of the tile before and whatever the other one has given them.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic import softmax
from paged.mosaic.refs import Inputs, Shared
from paged.mosaic.schedule import Schedule, Work, remainder
from paged.mosaic.spec import AttentionSpec
from paged.mosaic.storing import store
from paged.mosaic.values import clean_values

_TILE = plgpu.Layout.TCGEN05_TMEM_NATIVE
_BY_ROW = plgpu.Layout.TCGEN05_TMEM_NATIVE.reduce(1)

type _Sums = tuple[Array, Array]
"""Of a tile's rows: largest logit and sum of weights, `[128]`."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlackwellComputing:
    """What a computing warpgroup does."""

    inputs: Inputs
    output: Any
    shared: Shared
    schedule: Schedule
    spec: AttentionSpec

    @property
    def _warpgroup(self) -> Array:
        return lax.axis_index("warpgroup")

    def _mine(self, tensor_memory: Any, columns: int) -> Any:
        """Return this warpgroup's columns of an array in tensor memory."""
        first = pl.multiple_of(self._warpgroup * columns, columns)
        return tensor_memory.at[:, pl.ds(first, columns)]

    @property
    def _weighted(self) -> Any:
        return self._mine(self.shared.weighted, self.spec.head_dim)

    def run(self) -> None:
        """Compute and store the output of all work of the schedule."""
        plgpu.set_max_registers(self.spec.registers[0], action="increase")
        self.shared.declare_free()
        self.schedule.for_each(self._attend)
        plgpu.wait_smem_to_gmem(0)

    def _attend(self, work: Work, first_step: Array) -> Array:
        plgpu.barrier_wait(self.shared.q_ready)
        total = self._fold_all(work, first_step)
        plgpu.barrier_arrive(self.shared.q_free)
        last_step = first_step + work.num_tiles - 1
        pl.when(work.num_tiles > 0)(lambda: self._finish_values(last_step))
        pl.when(work.num_tiles == 0)(self._clear)

        def rows(first: int, end: int) -> Array:
            columns = self._weighted.at[:, pl.ds(first, end - first)]
            part = plgpu.async_load_tmem(columns, layout=_TILE)
            plgpu.wait_load_tmem()
            return softmax.normalize(part, total, self.inputs, work)

        store(rows, self.output, self.shared.output, work, self.spec)
        return first_step + work.num_tiles

    def _fold_all(self, work: Work, first_step: Array) -> Array:
        """Fold all tiles of keys; return the sum of weights of each row."""
        tile = functools.partial(self._fold_tile, work, first_step)
        masked = functools.partial(tile, is_masked=True)
        sums = softmax.first_sums(self.inputs, work, self.spec, _BY_ROW)
        start, end = softmax.open_tiles(work, self.spec)
        if self.spec.sliding_window is not None:
            sums = lax.fori_loop(0, start, masked, sums)
        sums = lax.fori_loop(start, end, functools.partial(tile, is_masked=False), sums)
        _, total = lax.fori_loop(end, work.num_tiles, masked, sums)
        return total

    def _fold_tile(
        self, work: Work, first_step: Array, index: Array, sums: _Sums, *, is_masked: bool
    ) -> _Sums:
        """Fold one tile of keys: into the sums, and into the weighted values in tensor memory."""
        largest, total = sums
        step = first_step + index
        stage = remainder(step, self.spec.num_stages)
        first_key = work.origin + index * self.spec.tile_keys

        key_scale = softmax.scale_of(self.inputs, 0, work)
        scores, factor = softmax.cap(self._multiply(stage), key_scale, self.spec)
        if is_masked:
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_TILE)
            scores = softmax.mask(scores, column, work, first_key, self.spec, _BY_ROW)
        weights, decay, largest, total = softmax.fold(scores, factor, largest, total)

        @pl.when(index > 0)
        def _() -> None:
            self._finish_values(step - 1)
            weighted = plgpu.async_load_tmem(self._weighted, layout=_TILE)
            plgpu.wait_load_tmem()
            weighted *= lax.broadcast_in_dim(decay, weighted.shape, [0])
            plgpu.async_store_tmem(self._weighted, weighted)

        mine = self._mine(self.shared.weights, self.spec.tile_keys)
        plgpu.async_store_tmem(mine, weights.astype(self.shared.v.dtype))
        plgpu.commit_tmem()
        plgpu.barrier_wait(self.shared.v_ready.at[stage])
        if is_masked:
            clean_values(self.shared, stage, first_key, work, self.spec)
        plgpu.tcgen05_mma(
            self._weighted,
            mine,
            self.shared.v.at[stage],
            self.shared.weighted_ready.at[self._warpgroup],
            accumulate=index > 0,
        )
        return largest, total

    def _multiply(self, stage: Array) -> Array:
        """Return the products of this warpgroup's queries and a tile of keys."""
        mine = self._mine(self.shared.scores, self.spec.tile_keys)
        ready = self.shared.scores_ready.at[self._warpgroup]
        plgpu.barrier_wait(self.shared.k_ready.at[stage])
        keys = self.shared.k.at[stage].transpose((1, 0))
        plgpu.tcgen05_mma(mine, self.shared.q.at[self._warpgroup], keys, ready, accumulate=False)
        plgpu.barrier_wait(ready)
        plgpu.barrier_arrive(self.shared.k_free.at[stage])
        products: Array = plgpu.async_load_tmem(mine, layout=_TILE)
        plgpu.wait_load_tmem()
        return products

    def _clear(self) -> None:
        """Set the weighted values to zero: without keys, no product does."""
        shape = (self.spec.tile_rows, self.spec.head_dim)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _TILE)
        plgpu.async_store_tmem(self._weighted, zeros)
        plgpu.commit_tmem()

    def _finish_values(self, step: Array) -> None:
        """Wait until the values of a step have been weighed."""
        plgpu.barrier_wait(self.shared.weighted_ready.at[self._warpgroup])
        plgpu.barrier_arrive(self.shared.v_free.at[remainder(step, self.spec.num_stages)])
