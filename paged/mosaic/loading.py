"""The warpgroup that loads: queries of each item, then its keys and values, tile by tile."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.refs import Inputs, Shared
from paged.mosaic.schedule import Schedule, Work, divide, remainder
from paged.mosaic.spec import COMPUTE_WARPGROUPS, ROW_UNIT, AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Loading:
    """What the loading warpgroup does."""

    inputs: Inputs
    shared: Shared
    schedule: Schedule
    spec: AttentionSpec

    def run(self) -> None:
        """Load everything that the schedule asks for, as room becomes free."""
        plgpu.set_max_registers(self.spec.registers[1], action="decrease")
        self.schedule.for_each(self._load)
        # A barrier must not be left while it still counts.
        plgpu.barrier_wait(self.shared.q_free)
        for stage in range(self.spec.num_stages):
            plgpu.barrier_wait(self.shared.k_free.at[stage])
            plgpu.barrier_wait(self.shared.v_free.at[stage])

    def _load(self, work: Work, step: Array) -> Array:
        plgpu.barrier_wait(self.shared.q_free)
        self._load_queries(work)

        def tile(index: Array, step: Array) -> Array:
            self._load_tile(work, index, step)
            return step + 1

        return lax.fori_loop(0, work.num_tiles, tile, step)

    def _load_queries(self, work: Work) -> None:
        folding = self.spec.folding
        for warpgroup in range(COMPUTE_WARPGROUPS):
            # Rows past the last one arrive as zeros, rows of other sequences as they are: a row
            # touches nothing but its own output, which is not stored.
            first = pl.multiple_of(work.row + warpgroup * folding.num_tokens, ROW_UNIT)
            rows = pl.ds(first, folding.num_tokens)
            for head in range(folding.num_heads):
                slab = pl.ds(head * folding.num_tokens, folding.num_tokens)
                plgpu.copy_gmem_to_smem(
                    self.inputs.q.at[rows, work.first_head + head],
                    self.shared.q.at[warpgroup, slab],
                    self.shared.q_ready,
                )

    def _load_tile(self, work: Work, index: Array, step: Array) -> None:
        spec, shared = self.spec, self.shared
        stage = remainder(step, spec.num_stages)
        first_key = work.origin + index * spec.tile_keys
        sources = [
            self._block(work, first_key + copy * spec.copy_keys)
            for copy in range(spec.copies_per_tile)
        ]
        for kind, (target, ready, free) in enumerate(
            (
                (shared.k, shared.k_ready, shared.k_free),
                (shared.v, shared.v_ready, shared.v_free),
            )
        ):
            plgpu.barrier_wait(free.at[stage])
            for copy, (block, rows) in enumerate(sources):
                plgpu.copy_gmem_to_smem(
                    self.inputs.kv_cache.at[block, kind, work.kv_head, rows],
                    target.at[stage, pl.ds(copy * spec.copy_keys, spec.copy_keys)],
                    ready.at[stage],
                )

    def _block(self, work: Work, key: Array) -> tuple[Array, Any]:
        """Return the block that holds a key, and which of its rows make a copy."""
        spec = self.spec
        # Behind the context the last block is loaded again: the table may end there.
        last = jnp.maximum(work.context - 1, 0)
        block = self.inputs.block_tables[work.seq, divide(jnp.minimum(key, last), spec.block_size)]
        if spec.copy_keys == spec.block_size:
            return block, slice(None)
        first = pl.multiple_of(remainder(key, spec.block_size), ROW_UNIT)
        return block, pl.ds(first, spec.copy_keys)
