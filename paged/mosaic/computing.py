"""The warpgroups that compute: online softmax over the tiles of keys of each item."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.refs import Inputs, Shared
from paged.mosaic.schedule import Schedule, Work, divide, divide_up, remainder
from paged.mosaic.spec import TILE_ROWS, AttentionSpec
from paged.mosaic.storing import store
from paged.mosaic.values import clean_values

# Of a thread: 2 x 128 threads x 232 and 128 x 40 are the 65,536 of a multiprocessor, nearly.
_REGISTERS = 232

# Stands for minus infinity where the difference of two must not be NaN.
_MASKED = -1e30
_LOG2_E = math.log2(math.e)

_TILE = plgpu.Layout.WGMMA
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

type _Sums = tuple[Array, Array, Array]
"""Of a tile's rows: weighted values `[64, head_dim]`, largest logit and sum of weights `[64]`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Computing:
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
        plgpu.set_max_registers(_REGISTERS, action="increase")
        # At first everything is free.
        plgpu.barrier_arrive(self.shared.q_free)
        for stage in range(self.spec.num_stages):
            plgpu.barrier_arrive(self.shared.k_free.at[stage])
            plgpu.barrier_arrive(self.shared.v_free.at[stage])
        self.schedule.for_each(self._attend)
        plgpu.wait_smem_to_gmem(0)

    def _attend(self, work: Work, first_step: Array) -> Array:
        plgpu.barrier_wait(self.shared.q_ready)
        pl.when(work.num_tiles > 0)(lambda: self._wait_for_keys(first_step))
        pl.when(self._warpgroup == 1)(self._take_turns)
        sums = self._fold_all(work, first_step)
        pl.when(self._warpgroup == 0)(self._take_turns)
        plgpu.barrier_arrive(self.shared.q_free)

        weighted, _, total = sums
        share = self._scale(1, work) / jnp.where(total == 0.0, 1.0, total)
        weighted *= lax.broadcast_in_dim(share, weighted.shape, [0])
        store(weighted, self.output, self.shared.output, work, self.spec)
        return first_step + work.num_tiles

    def _fold_all(self, work: Work, first_step: Array) -> _Sums:
        """Return the sums over all tiles of keys."""
        keys = self.spec.tile_keys
        fold = functools.partial(self._fold_tile, work, first_step)
        masked = functools.partial(fold, is_masked=True)
        # Tiles that all rows see need no mask: those before them have left the window of the last
        # rows, those behind them are still to come for the first rows.
        open_start = jnp.int32(0)
        sums = self._no_sums(work)
        if self.spec.sliding_window is not None:
            last_position = work.high + work.offset - 1
            num_left = last_position - (self.spec.sliding_window - 1) - work.origin
            open_start = jnp.minimum(divide_up(jnp.maximum(num_left, 0), keys), work.num_tiles)
            sums = lax.fori_loop(0, open_start, masked, sums)
        first_position = work.low + work.offset
        num_open = divide(jnp.maximum(first_position + 1 - work.origin, 0), keys)
        open_end = jnp.maximum(jnp.minimum(num_open, work.num_tiles), open_start)
        sums = lax.fori_loop(open_start, open_end, functools.partial(fold, is_masked=False), sums)
        sums = lax.fori_loop(open_end, work.num_tiles, masked, sums)
        return sums

    def _no_sums(self, work: Work) -> _Sums:
        """Return the sums over no keys: nothing, or each row's sink."""
        sinks, folding = self.inputs.sinks, self.spec.folding
        weighted = jnp.zeros((TILE_ROWS, self.spec.head_dim), jnp.float32)
        total = jnp.full((TILE_ROWS,), 0.0 if sinks is None else 1.0, jnp.float32)
        largest = plgpu.layout_cast(jnp.full((TILE_ROWS,), _MASKED, jnp.float32), _BY_ROW)
        if sinks is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=_BY_ROW)
            for head in range(folding.num_heads):
                sink = sinks[work.first_head + head].astype(jnp.float32) * _LOG2_E
                largest = jnp.where(row >= head * folding.num_tokens, sink, largest)
        return plgpu.layout_cast(weighted, _TILE), largest, plgpu.layout_cast(total, _BY_ROW)

    def _fold_tile(
        self, work: Work, first_step: Array, index: Array, sums: _Sums, *, is_masked: bool
    ) -> _Sums:
        """Fold one tile of keys into the sums; logits are to base 2."""
        weighted, largest, total = sums
        step = first_step + index
        stage = remainder(step, self.spec.num_stages)
        first_key = work.origin + index * self.spec.tile_keys

        scores, factor = self._capped(self._multiply(stage), self._scale(0, work))
        if is_masked:
            scores = jnp.where(self._is_seen(work, first_key), scores, _MASKED)
        larger = jnp.maximum(largest, scores.max(axis=1) * factor)
        # Until a row meets its first key its weights are 1 on masked ones; the decay wipes them.
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(larger, scores.shape, [0]))
        decay = jnp.exp2(largest - larger)
        total = total * decay + weights.sum(axis=1)
        weighted *= lax.broadcast_in_dim(decay, weighted.shape, [0])
        weights = weights.astype(self.shared.v.dtype)
        # All of the softmax before the turn is over.
        weighted, larger, total, weights = lax.optimization_barrier(
            (weighted, larger, total, weights)
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
        return weighted, larger, total

    def _multiply(self, stage: Array) -> Array:
        """Return the products of this warpgroup's queries and a tile of keys."""

        def multiply(products: Any) -> Array:
            keys = self.shared.k.at[stage].transpose((1, 0))
            plgpu.wgmma(products, self.shared.q.at[self._warpgroup], keys)
            self._take_turns()
            result: Array = products[...]
            return result

        shape = (TILE_ROWS, self.spec.tile_keys)
        products: Array = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
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

        result: Array = pl.run_state(multiply)(plgpu.ACC.init(weighted))
        return result

    def _capped(self, products: Array, scale: Array) -> tuple[Array, Array]:
        """Return what the mask applies to, and what makes logits to base 2 of it."""
        cap = self.spec.soft_cap
        factor = scale * (self.spec.scale * _LOG2_E)
        if cap is None:
            return products, factor
        # cap tanh(x) = cap (1 - 2 / (exp(2 x) + 1)), all in base 2.
        power = jnp.exp2(products * (factor * (2.0 / cap)))
        return cap * (1.0 - 2.0 / (power + 1.0)), jnp.float32(_LOG2_E)

    def _is_seen(self, work: Work, first_key: Array) -> Array:
        """Return which keys of a tile each row sees, `[64, tile_keys]`."""
        spec, num_tokens = self.spec, self.spec.folding.num_tokens
        shape = (TILE_ROWS, spec.tile_keys)
        # Loaded, not counted: the compiler would move 32 registers of it out of all loops, and
        # spill them to memory.
        column = plgpu.load(
            self.inputs.columns.at[pl.ds(0, spec.tile_keys)], layout=_BY_COLUMN, optimized=False
        )
        column = lax.broadcast_in_dim(column, shape, [1])
        row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=_BY_ROW)
        token = self._warpgroup * num_tokens + (row & (num_tokens - 1))
        last = token + (work.row + work.offset - first_key)
        last = lax.broadcast_in_dim(last, shape, [0])
        is_seen = column <= last
        if spec.sliding_window is not None:
            is_seen &= column > last - spec.sliding_window
        return is_seen

    def _scale(self, kind: int, work: Work) -> Array:
        """Return what cached keys (0) or values (1) are multiplied by."""
        scales = self.inputs.kv_scales
        return jnp.float32(1.0) if scales is None else scales[kind, work.kv_head]

    def _wait_for_keys(self, step: Array) -> None:
        plgpu.barrier_wait(self.shared.k_ready.at[remainder(step, self.spec.num_stages)])

    def _take_turns(self) -> None:
        plgpu.barrier_arrive(self.shared.turn)
        plgpu.barrier_wait(self.shared.turn)
