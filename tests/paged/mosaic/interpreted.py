"""The Mosaic kernel as JAX's interpreter for GPU kernels runs it, with its race detector on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.attention import attend_with
from paged.mosaic.plan import make_plan
from paged.mosaic.spec import fold
from tests.paged.oracle import Batch, Shape

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@functools.cache
def compiled(shape: Shape, num_programs: int):
    def call(q, kv_cache, tables, lens, starts, kv_scales, sinks):
        plan = make_plan(
            tables,
            lens,
            starts,
            num_tokens=shape.num_tokens,
            rows_per_item=fold(shape.queries_per_kv).rows_per_item,
            sliding_window=shape.sliding_window,
        )
        return attend_with(
            INTERPRET,
            num_programs,
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


def attend(batch: Batch, num_programs: int = 2) -> np.ndarray:
    """Return the kernel's output; fail if accesses to memory raced."""
    arrays = map(jnp.asarray, batch.arrays)
    call = compiled(batch.shape, num_programs)
    output = np.asarray(call(*arrays, batch.kv_scales, batch.sinks))
    assert not get_races().races_found
    return output
