"""How kernels are called: one record per call, so that another runner can take jax-triton's place.

Tests run the same calls in Triton's interpreter, which has no part in JAX.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_triton
from jax import Array, lax

from paged.gpu.traits import Gpu, current_gpu


class NewArray(NamedTuple):
    """Shape and dtype of an array that a kernel fills."""

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; arrays are passed in this order, `spec` last.

    Attributes:
      kernel: a function decorated with `triton.jit`.
      grid: programs along each axis.
      inputs: arrays that are read.
      updated: arrays that are written in place, and returned.
      outputs: new arrays, whose content is what the kernel writes.
      spec: what the kernel is compiled for.
      num_warps, num_stages: threads of a program over 32; depth of the pipeline of its loads.
    """

    kernel: Any
    grid: tuple[int, ...]
    inputs: tuple[Array, ...]
    updated: tuple[Array, ...]
    outputs: tuple[NewArray, ...]
    spec: Any
    num_warps: int
    num_stages: int


type Runner = Callable[[Launch], Sequence[Array]]
"""Runs a launch and returns its updated arrays, then its outputs."""


def run_on_gpu(launch: Launch) -> Sequence[Array]:
    """Run a launch as part of the JAX program that is being traced."""
    gpu = current_gpu()
    new_arrays = tuple(
        jax.ShapeDtypeStruct(*array)  # type: ignore[no-untyped-call]
        for array in launch.outputs
    )
    refs = tuple(jax.new_ref(_passable(array, gpu)) for array in launch.updated)
    outputs = jax_triton.triton_call(
        *(_passable(array, gpu) for array in launch.inputs),
        *refs,
        kernel=launch.kernel,
        out_type=new_arrays,
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        # Asked of the target, not of a device, so that a machine without one can compile.
        compute_capability=gpu.compute_capability,
        backend_options=_OPTIONS,
        spec=launch.spec,
    )
    updated = (
        lax.bitcast_convert_type(jax.freeze(ref), array.dtype)
        for ref, array in zip(refs, launch.updated, strict=True)
    )
    return (*updated, *outputs)


def _passable(array: Array, gpu: Gpu) -> Array:
    """Return the array as a type that the GPU's compiler knows; it stays where it is."""
    if array.dtype == jnp.float8_e4m3fn and not gpu.has_float8:
        return lax.bitcast_convert_type(array, jnp.uint8)
    return array


# PTX 8.6 is the newest that ptxas 12.9 reads, which JAX brings. Triton 3.10 will not fuse products
# and sums any more unless asked.
_OPTIONS = {"ptx_version": 86, "enable_fp_fusion": True}
