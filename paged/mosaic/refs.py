"""The memory that a program works with, by name."""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What the kernel reads, in global memory: arrays outside of it, references inside.

    Attributes:
      q: `[num_tokens, num_q_heads, head_dim]`.
      kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
      block_tables, items, num_live, columns: see `AttentionPlan`.
      kv_scales: `[2, num_kv_heads]` float32, or None.
      sinks: `[num_q_heads]`, or None.
    """

    q: Any
    kv_cache: Any
    block_tables: Any
    items: Any
    num_live: Any
    columns: Any
    kv_scales: Any
    sinks: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory of a program, and the barriers by which it changes hands.

    Attributes:
      q: `[2, tile_rows, head_dim]`, a tile of queries for each computing warpgroup.
      k, v: `[num_stages, tile_keys, head_dim]`.
      output: `[2, tile_rows, store_columns]`.
      q_ready, k_ready, v_ready: loaded, by stage; computing may read.
      q_free, k_free, v_free: read by all, by stage; loading may overwrite.
      v_clean: the values that nobody may see are zeros now, by stage.
      turn: on Hopper, the other computing warpgroup has had its turn at the tensor cores.
      scores, weights: on Blackwell, `[128, 2 * tile_keys]` of tensor memory, half a warpgroup's.
      weighted: `[128, 2 * head_dim]`, likewise.
      scores_ready, weighted_ready: multiplied, by warpgroup.
    """

    q: Any
    k: Any
    v: Any
    output: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    v_clean: Any
    turn: Any = None
    scores: Any = None
    weights: Any = None
    weighted: Any = None
    scores_ready: Any = None
    weighted_ready: Any = None

    def declare_free(self) -> None:
        """Say, as a computing warpgroup, that everything may be loaded into: at first it may."""
        plgpu.barrier_arrive(self.q_free)
        for stage in range(self.k.shape[0]):
            plgpu.barrier_arrive(self.k_free.at[stage])
            plgpu.barrier_arrive(self.v_free.at[stage])
