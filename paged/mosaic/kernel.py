"""Ragged paged attention: TMA, the tensor cores, warp specialisation and a persistent grid.

A program has three warpgroups. One loads queries, and the blocks of keys and values that the block
table names, into shared memory (`paged/mosaic/loading.py`). The other two compute a tile of rows
each: while one has the tensor cores, the other does its softmax (`paged/mosaic/hopper.py`,
`paged/mosaic/blackwell.py`). Programs are as many as multiprocessors and walk over the items of the
plan. Source: FlashAttention-3, arXiv:2407.08608; online softmax, arXiv:2205.14135.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.blackwell import BlackwellComputing
from paged.mosaic.hopper import HopperComputing
from paged.mosaic.loading import Loading
from paged.mosaic.plan import AttentionPlan
from paged.mosaic.refs import Inputs, Shared
from paged.mosaic.schedule import Schedule
from paged.mosaic.spec import COMPUTE_WARPGROUPS, ROW_UNIT, AttentionSpec


def run_kernel(
    q: Array,
    kv_cache: Array,
    plan: AttentionPlan,
    kv_scales: Array | None,
    sinks: Array | None,
    spec: AttentionSpec,
    interpret: plgpu.InterpretGPUParams | None,
) -> Array:
    """Return the attention of the plan's items, `[num_tokens, num_q_heads, head_dim]`.

    Args:
      q, kv_cache, kv_scales, sinks: as in `ragged_paged_attention`.
      plan: the items of the batch.
      spec: what to compile for.
      interpret: how to interpret the kernel on a CPU; None compiles it.
    """
    # A TMA load of queries is cut from whole units of rows. Buckets are whole; else q is copied.
    padding = ((0, -q.shape[0] % ROW_UNIT), (0, 0), (0, 0))
    whole_q = jnp.pad(q, padding) if padding[0][1] else q
    inputs = Inputs(
        whole_q,
        kv_cache,
        plan.block_tables,
        plan.items,
        plan.num_live,
        plan.columns,
        kv_scales,
        sinks,
    )
    # An array that is not given is no leaf, and costs nothing.
    leaves, tree = jax.tree.flatten(inputs)

    def ragged_paged_attention(*refs: Any, **shared: Any) -> None:
        given, output = refs[: len(leaves)], refs[len(leaves)]
        _program(jax.tree.unflatten(tree, given), output, Shared(**shared), spec, interpret)

    kernel = plgpu.kernel(
        ragged_paged_attention,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(spec, q.dtype),
        grid=(spec.num_programs,),
        grid_names=("program",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    output: Array = kernel(*leaves)
    return output


def _program(
    inputs: Inputs,
    output: Any,
    shared: Shared,
    spec: AttentionSpec,
    interpret: plgpu.InterpretGPUParams | None,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    schedule = Schedule(inputs, spec)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _() -> None:
        Loading(inputs, shared, schedule, spec).run()

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _() -> None:
        if spec.is_blackwell:
            BlackwellComputing(inputs, output, shared, schedule, spec).run()
        else:
            is_interpreted = interpret is not None
            HopperComputing(inputs, output, shared, schedule, spec, is_interpreted).run()


def _scratch(spec: AttentionSpec, dtype: Any) -> dict[str, Any]:
    """Return what `Shared` is made of."""
    swizzled = (
        plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(128),  # type: ignore[abstract]
    )
    tile = (COMPUTE_WARPGROUPS, spec.tile_rows)
    keys = (spec.num_stages, spec.tile_keys, spec.head_dim)
    num_slabs = COMPUTE_WARPGROUPS * spec.folding.num_heads
    loaded = plgpu.Barrier(num_arrivals=spec.copies_per_tile, num_barriers=spec.num_stages)
    used = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=spec.num_stages)
    both = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS)
    return {
        "q": plgpu.SMEM((*tile, spec.head_dim), dtype, transforms=swizzled),
        "k": plgpu.SMEM(keys, dtype, transforms=swizzled),
        "v": plgpu.SMEM(keys, dtype, transforms=swizzled),
        "output": plgpu.SMEM((*tile, spec.store_columns), dtype),
        "q_ready": plgpu.Barrier(num_arrivals=num_slabs),
        "q_free": both,
        "k_ready": loaded,
        "k_free": used,
        "v_ready": loaded,
        "v_free": used,
        "v_clean": plgpu.Barrier(num_barriers=spec.num_stages),
        **(_tensor_memory(spec, dtype) if spec.is_blackwell else {"turn": both}),
    }


def _tensor_memory(spec: AttentionSpec, dtype: Any) -> dict[str, Any]:
    """Return the same for what Blackwell alone has."""
    keys, columns = (COMPUTE_WARPGROUPS * n for n in (spec.tile_keys, spec.head_dim))
    multiplied = plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS, orders_tensor_core=True)
    return {
        "scores": plgpu.TMEM((spec.tile_rows, keys), jnp.float32),
        "weights": plgpu.TMEM((spec.tile_rows, keys), dtype, packed=True),
        "weighted": plgpu.TMEM((spec.tile_rows, columns), jnp.float32),
        "scores_ready": multiplied,
        "weighted_ready": multiplied,
    }
