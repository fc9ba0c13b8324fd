"""`measure_host`: bandwidth and arithmetic of this CPU, by the product that an engine uses."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged.native.linear import PackedWeight, pack, packed_linear

_REPEATS = 5
_ROWS = (64, 256, 512)
# Outputs and inputs: of a weight that no cache holds, and of one that all do.
_LARGE = (16384, 4096)
_SMALL = (3072, 1536)


class HostRates(NamedTuple):
    """What this CPU does, not what its data sheet says.

    Attributes:
      gb_per_second: of weights that a product with one row reads, the faster of that and of one
        pass over an array.
      tflops: of the largest of some products with many rows.
      product: which product was measured, such as "native bfloat16" or "XLA float32".
    """

    gb_per_second: float
    tflops: float
    product: str


def measure_host(
    linear_backend: str,
    dtype: str,
    *,
    large: tuple[int, int] = _LARGE,
    small: tuple[int, int] = _SMALL,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> HostRates:
    """Return the rates of this CPU; takes some seconds.

    A plan that takes the rate of another product than the engine's is no bound for the engine: the
    units for bfloat16 are several times faster than those for float32, and XLA's product uses them
    less well than the native one.

    Args:
      linear_backend: "native" or "xla", as a loaded engine's config says; native kernels must be
        loaded then.
      dtype: of weights and rows, "bfloat16" or "float32".
      large, small: outputs and inputs of the weights for bandwidth and for arithmetic.
      seconds_of: returns the time of a function; None takes the best of some calls.
    """
    seconds_of = seconds_of or _best_seconds
    passed_over = np.ones(large, np.float32)
    gb_per_second = passed_over.nbytes / seconds_of(passed_over.sum) / 1e9
    del passed_over
    multiply = _product(linear_backend, dtype, large)
    num_bytes = large[0] * large[1] * jnp.dtype(dtype).itemsize
    read = num_bytes / seconds_of(lambda: multiply(1)) / 1e9
    multiply = _product(linear_backend, dtype, small)
    flops = max(
        2 * rows * small[0] * small[1] / seconds_of(lambda rows=rows: multiply(rows))  # type: ignore[misc]
        for rows in _ROWS
    )
    name = "native" if linear_backend == "native" else "XLA"
    return HostRates(max(gb_per_second, read), flops / 1e12, f"{name} {dtype}")


def _product(linear_backend: str, dtype: str, shape: tuple[int, int]) -> Callable[[int], object]:
    """Return a function that multiplies so many rows by a weight of this shape, and waits."""
    num_outputs, num_inputs = shape
    weight = jnp.full(shape, 1 / num_inputs, dtype)
    if linear_backend == "native":
        words = jnp.array(pack(np.asarray(weight)))
        run = jax.jit(lambda x, words: packed_linear(x, [PackedWeight(words, num_outputs)])[0])
    else:
        words = weight
        run = jax.jit(lambda x, words: jnp.einsum("TD,FD->TF", x, words))
    rows: dict[int, Array] = {}

    def multiply(num_rows: int) -> object:
        x = rows.setdefault(num_rows, jnp.ones((num_rows, num_inputs), dtype))
        return run(x, words).block_until_ready()

    return multiply


def _best_seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of a function, seconds; a first call, which compiles, is not one."""
    work()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
