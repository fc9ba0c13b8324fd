"""The computing warpgroups on Hopper: wgmma, with sums in registers, taking turns."""

import dataclasses
import functools
from collections.abc import Callable
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

_ACCUMULATOR = plgpu.ACC  # type: ignore[attr-defined]
_TILE = plgpu.Layout.WGMMA
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

type _Sums = tuple[Array, Array, Array]
"""Of a tile's rows: weighted values `[64, head_dim]`, largest logit and sum of weights `[64]`."""


@dataclasses.dataclass(frozen=True, slots=True)
class HopperComputing:
    """What a computing warpgroup does."""

    inputs: Inputs
    output: Any
    shared: Shared
    schedule: Schedule
    spec: AttentionSpec
    is_interpreted: bool

    @property
    def _warpgroup(self) -> Array:
        return lax.axis_index("warpgroup")

    def run(self) -> None:
        """Compute and store the output of all work of the schedule."""
        plgpu.set_max_registers(self.spec.registers[0], action="increase")
        self.shared.declare_free()
        self.schedule.for_each(self._attend)
        plgpu.wait_smem_to_gmem(0)

    def _attend(self, work: Work, first_step: Array) -> Array:
        plgpu.barrier_wait(self.shared.q_ready)
        pl.when(work.num_tiles > 0)(lambda: self._wait_for_keys(first_step))
        pl.when(self._warpgroup == 1)(self._take_turns)
        weighted, _, total = self._fold_all(work, first_step)
        pl.when(self._warpgroup == 0)(self._take_turns)
        plgpu.barrier_arrive(self.shared.q_free)
        rows = softmax.normalize(weighted, total, self.inputs, work)
        store(
            lambda first, end: rows[:, first:end], self.output, self.shared.output, work, self.spec
        )
        return first_step + work.num_tiles

    def _fold_all(self, work: Work, first_step: Array) -> _Sums:
        """Return the sums over all tiles of keys."""
        tile = functools.partial(self._fold_tile, work, first_step)
        masked = functools.partial(tile, is_masked=True)
        weighted = jnp.zeros((self.spec.tile_rows, self.spec.head_dim), jnp.float32)
        first = softmax.first_sums(self.inputs, work, self.spec, _BY_ROW)
        sums = (plgpu.layout_cast(weighted, _TILE), *first)
        start, end = softmax.open_tiles(work, self.spec)
        if self.spec.sliding_window is not None:
            sums = lax.fori_loop(0, start, masked, sums)
        sums = lax.fori_loop(start, end, functools.partial(tile, is_masked=False), sums)
        sums = lax.fori_loop(end, work.num_tiles, masked, sums)
        return sums

    def _fold_tile(
        self, work: Work, first_step: Array, index: Array, sums: _Sums, *, is_masked: bool
    ) -> _Sums:
        """Fold one tile of keys into the sums."""
        weighted, largest, total = sums
        step = first_step + index
        stage = remainder(step, self.spec.num_stages)
        first_key = work.origin + index * self.spec.tile_keys

        key_scale = softmax.scale_of(self.inputs, 0, work)
        scores, factor = softmax.cap(self._multiply(stage), key_scale, self.spec)
        if is_masked:
            scores = softmax.mask(scores, self._columns(), work, first_key, self.spec, _BY_ROW)
        weights, decay, largest, total = softmax.fold(scores, factor, largest, total)
        weighted *= lax.broadcast_in_dim(decay, weighted.shape, [0])
        # All of the softmax before the turn is over.
        weighted, largest, total, weights = lax.optimization_barrier(
            (weighted, largest, total, weights.astype(self.shared.v.dtype))
        )

        plgpu.barrier_arrive(self.shared.turn)
        plgpu.barrier_wait(self.shared.v_ready.at[stage])
        if is_masked:
            clean_values(self.shared, stage, first_key, work, self.spec)
        plgpu.barrier_wait(self.shared.turn)

        def wait_for_next() -> None:
            pl.when(index + 1 < work.num_tiles)(lambda: self._wait_for_keys(step + 1))

        weighted = self._weigh(weighted, weights, stage, wait_for_next)
        plgpu.barrier_arrive(self.shared.v_free.at[stage])
        return weighted, largest, total

    def _multiply(self, stage: Array) -> Array:
        """Return the products of this warpgroup's queries and a tile of keys."""

        def multiply(products: Any) -> Array:
            keys = self.shared.k.at[stage].transpose((1, 0))
            plgpu.wgmma(products, self.shared.q.at[self._warpgroup], keys)
            self._take_turns()
            result: Array = products[...]
            return result

        shape = (self.spec.tile_rows, self.spec.tile_keys)
        products: Array = pl.run_scoped(multiply, _ACCUMULATOR(shape, jnp.float32))
        plgpu.barrier_arrive(self.shared.k_free.at[stage])
        return products

    def _weigh(
        self, weighted: Array, weights: Array, stage: Array, meanwhile: Callable[[], None]
    ) -> Array:
        """Return `weighted` and the weighted sum of a tile of values; `meanwhile` overlaps."""
        if self.is_interpreted:
            # The interpreter has no wgmma with an operand in registers. The fence stands for what
            # wgmma does: it reads by the same proxy that TMA writes by, a load does not.
            values = self.shared.v[stage]
            plgpu.commit_smem()
            meanwhile()
            return weighted + jnp.dot(weights, values, preferred_element_type=jnp.float32)

        def multiply(products: Any) -> None:
            plgpu.wgmma(products, weights, self.shared.v.at[stage])
            meanwhile()

        result: Array = pl.run_state(multiply)(_ACCUMULATOR.init(weighted))
        return result

    def _columns(self) -> Array:
        """Return the index of each column of a tile of keys, `[64, tile_keys]`."""
        # Loaded, not counted: the compiler would move 32 registers of it out of all loops, and
        # spill them to memory.
        columns = self.inputs.columns.at[pl.ds(0, self.spec.tile_keys)]
        column = plgpu.load(columns, layout=_BY_COLUMN, optimized=False)
        return lax.broadcast_in_dim(column, (self.spec.tile_rows, self.spec.tile_keys), [1])

    def _wait_for_keys(self, step: Array) -> None:
        plgpu.barrier_wait(self.shared.k_ready.at[remainder(step, self.spec.num_stages)])

    def _take_turns(self) -> None:
        plgpu.barrier_arrive(self.shared.turn)
        plgpu.barrier_wait(self.shared.turn)
