"""The memory that a program works with, by name."""

import dataclasses
from typing import Any

import jax


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
      q: `[2, 64, head_dim]`, a tile of queries for each computing warpgroup.
      k, v: `[num_stages, tile_keys, head_dim]`.
      output: `[2, 64, store_columns]`.
      q_ready, k_ready, v_ready: loaded, by stage; computing may read.
      q_free, k_free, v_free: read by all, by stage; loading may overwrite.
      v_clean: the values that nobody may see are zeros now, by stage.
      turn: the other computing warpgroup has had its turn at the tensor cores.
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
    turn: Any
