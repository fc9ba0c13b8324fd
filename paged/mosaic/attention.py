"""The Mosaic backend of `ragged_paged_attention`: prefill on NVIDIA Hopper and Blackwell.

Batches of decodes go to the Triton backend where it can run, because splitting contexts is what
they need. In a mixed batch decodes take this kernel like the rest, one tile each.
"""

import functools
import importlib
from types import ModuleType

import jax
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged import backends
from paged.attention_call import AttentionCall
from paged.gpu.traits import Gpu, current_gpu
from paged.mosaic import support
from paged.mosaic.kernel import run_kernel
from paged.mosaic.plan import AttentionPlan, make_plan
from paged.mosaic.spec import AttentionSpec, fold, tile_rows_of


def unsupported(call: AttentionCall) -> str | None:
    """Return why the kernel cannot serve a call here, or None if it can."""
    return support.unsupported(call, current_gpu().compute_capability)


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
) -> object:
    """Return the items of a batch, as `paged.attention.plan_attention` documents."""
    is_decode_bucket = num_tokens <= block_tables.shape[0]
    if is_decode_bucket and backends.unavailable("triton") is None:
        triton_plan: object = _triton().plan(
            block_tables,
            seq_lens,
            query_start_loc,
            num_tokens=num_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            num_planes=num_planes,
            block_size=block_size,
            sliding_window=sliding_window,
        )
        return triton_plan
    tile_rows = tile_rows_of(current_gpu().compute_capability)
    return make_plan(
        block_tables,
        seq_lens,
        query_start_loc,
        num_tokens=num_tokens,
        rows_per_item=fold(num_q_heads // num_kv_heads, tile_rows).rows_per_item,
        sliding_window=sliding_window,
    )


# Jitted, although always called inside a jit: the layers of a model then share one trace.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def attend(
    q: Array,
    kv_cache: Array,
    plan: object,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Array | None,
    sinks: Array | None,
) -> Array:
    """Return the attention that `paged.attention.ragged_paged_attention` documents."""
    if not isinstance(plan, AttentionPlan):
        output: Array = _triton().attend(
            q,
            kv_cache,
            plan,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            kv_scales=kv_scales,
            sinks=sinks,
        )
        return output
    return attend_with(
        None,
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
    interpret: plgpu.InterpretGPUParams | None,
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
    """Return the same as it is done on a GPU: compiled, or interpreted as `interpret` says."""
    spec = AttentionSpec(
        num_q_heads=q.shape[1],
        num_kv_heads=kv_cache.shape[2],
        head_dim=q.shape[2],
        block_size=kv_cache.shape[3],
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_programs=gpu.num_multiprocessors,
        tile_rows=tile_rows_of(gpu.compute_capability),
    )
    return run_kernel(q, kv_cache, plan, kv_scales, sinks, spec, interpret)


def _triton() -> ModuleType:
    """Return the Triton backend, which is imported only where it runs."""
    return importlib.import_module("paged.triton.attention")
