"""The Triton backend of `ragged_paged_attention`, for NVIDIA GPUs from sm_80 on."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from paged.gpu.traits import Gpu, current_gpu
from paged.triton.kernels.attention import attention_kernel
from paged.triton.kernels.combine import combine_kernel
from paged.triton.launch import Launch, NewArray, Runner, run_on_gpu
from paged.triton.plan import AttentionPlan, make_plan
from paged.triton.spec import AttentionSpec, CombineSpec, next_power_of_2
from paged.triton.support import unsupported as unsupported
from paged.triton.tiles import choose_tiles

# Decodes are cut into about so many items for each multiprocessor. Three programs fit into one of
# an H200 at a time; twice as many leave half an item as the longest wait for the last one.
_ITEMS_PER_MULTIPROCESSOR = 6


def plan(
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    num_planes: int,
    block_size: int,
    sliding_window: int | None,
) -> AttentionPlan:
    """Return the items of a batch, as `paged.attention.plan_attention` documents."""
    del num_planes  # two: see `unsupported`
    programs = _ITEMS_PER_MULTIPROCESSOR * current_gpu().num_multiprocessors
    return make_plan(
        block_tables,
        seq_lens,
        query_start_loc,
        num_tokens=num_tokens,
        group=num_q_heads // num_kv_heads,
        block_size=block_size,
        sliding_window=sliding_window,
        wanted_items=-(-programs // num_kv_heads),
    )


# Jitted, although always called inside a jit: the layers of a model then share one trace, and with
# it one compilation of each kernel.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def attend(
    q: Array,
    kv_cache: Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Array | None,
    sinks: Array | None,
) -> Array:
    """Return the attention that `paged.attention.ragged_paged_attention` documents."""
    return attend_with(
        run_on_gpu,
        current_gpu(),
        q,
        kv_cache,
        plan,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        sinks=sinks,
    )


def attend_with(
    run: Runner,
    gpu: Gpu,
    q: Array,
    kv_cache: Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Array | None,
    sinks: Array | None,
) -> Array:
    """Return the same by kernels that `run` runs, as they are compiled for `gpu`."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_q_heads // num_kv_heads
    is_e4m3 = kv_cache.dtype == jnp.float8_e4m3fn
    tile_rows = next_power_of_2(plan.rows_per_wide_tile * group)
    tiles = choose_tiles(
        head_dim=head_dim,
        is_float32=q.dtype == jnp.float32,
        tile_rows=tile_rows if plan.num_wide_items else None,
        compute_capability=gpu.compute_capability,
    )
    spec = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        table_width=plan.block_tables.shape[1],
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_kv_scales=kv_scales is not None,
        has_sinks=sinks is not None,
        is_e4m3=is_e4m3,
        decodes_bytes=is_e4m3 and not gpu.has_float8,
        precision="tf32x3" if q.dtype == jnp.float32 else "tf32",
        wide_rows=tile_rows // tiles.wide_slices,
        wide_keys=tiles.wide_keys,
        narrow_rows=max(16, next_power_of_2(group)),
        narrow_keys=tiles.narrow_keys,
        num_wide_items=plan.num_wide_items,
    )
    num_items = plan.items.shape[0]
    # Without parts a pointer must be passed all the same; nothing goes through it.
    num_slots = num_items - plan.num_wide_items if plan.has_parts else 0
    parts = (max(num_slots, 1), num_kv_heads, spec.narrow_rows)
    output, partial, stats = run(
        Launch(
            kernel=attention_kernel,
            grid=(num_items, num_kv_heads, tiles.wide_slices),
            inputs=(
                q,
                kv_cache,
                plan.block_tables,
                plan.items,
                plan.items if kv_scales is None else kv_scales,
                plan.items if sinks is None else sinks,
            ),
            updated=(),
            outputs=(
                NewArray(q.shape, q.dtype),
                NewArray((*parts, head_dim), jnp.float32),
                NewArray((*parts, 2), jnp.float32),
            ),
            spec=spec,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    )
    if not plan.has_parts:
        return output
    (output,) = run(
        Launch(
            kernel=combine_kernel,
            grid=(plan.tiles.shape[0], num_q_heads),
            inputs=(partial, stats, plan.tiles),
            updated=(output,),
            outputs=(),
            spec=CombineSpec(num_q_heads, num_kv_heads, head_dim, spec.narrow_rows, chunk=16),
            num_warps=4,
            num_stages=2,
        )
    )
    return output
