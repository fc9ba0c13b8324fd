"""The Mosaic kernel as JAX's interpreter for GPU kernels runs it, with its race detector on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.gpu.traits import Gpu
from paged.mosaic.attention import attend_with
from paged.mosaic.plan import make_plan
from paged.mosaic.spec import fold, tile_rows_of
from tests.paged.oracle import Batch, Shape

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


# As many multiprocessors as there should be programs.
HOPPER, BLACKWELL = Gpu(90, 2), Gpu(100, 2)


@functools.cache
def compiled(shape: Shape, gpu: Gpu):
    tile_rows = tile_rows_of(gpu.compute_capability)

    def call(q, kv_cache, tables, lens, starts, kv_scales, sinks):
        plan = make_plan(
            tables,
            lens,
            starts,
            num_tokens=shape.num_tokens,
            rows_per_item=fold(shape.queries_per_kv, tile_rows).rows_per_item,
            sliding_window=shape.sliding_window,
        )
        return attend_with(
            INTERPRET,
            gpu,
            q,
            kv_cache,
            plan,
            scale=shape.scale or shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            kv_scales=kv_scales,
            sinks=sinks,
        )

    return jax.jit(call)


def attend(batch: Batch, gpu: Gpu = HOPPER) -> np.ndarray:
    """Return the kernel's output; fail if accesses to memory raced."""
    arrays = map(jnp.asarray, batch.arrays)
    call = compiled(batch.shape, gpu)
    output = np.asarray(call(*arrays, batch.kv_scales, batch.sinks))
    assert not get_races().races_found
    return output
