"""Clocks: how long a call takes, how fast memory and products are, and when to stop."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.programs import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call: the median, and the range."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What the machine reaches without us: bytes read and written, and FLOP, per second."""

    copy: float
    product: float


class Clock:
    """Time left of a budget.

    Args:
      seconds: the budget, from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left; negative when it is over."""
        return self._end - time.monotonic()


def time_calls(call: Callable[[], Any], *, seconds: float, calls: int = 10) -> Times:
    """Return the time of a call from at least five samples of `calls` each.

    Calls are queued without waiting and waited for together, as an engine's steps are.

    Args:
      call: starts the work and returns arrays of it.
      seconds: samples are taken for about so long.
      calls: of a sample, at most: fewer if they take longer than a tenth of a second.
    """
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, min(calls, int(0.1 / (time.perf_counter() - started))))
    clock, samples = Clock(seconds), []
    while len(samples) < 5 or (clock.left > 0 and len(samples) < 50):
        started = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        samples.append((time.perf_counter() - started) / calls)
    return Times(statistics.median(samples), min(samples), max(samples))


def time_program(
    compiled: Any, program: Program, inputs: Sequence[jax.Array], *, seconds: float, calls: int
) -> Times:
    """Return the time of one repeat of a program; `inputs` may be used up."""
    arrays = list(inputs)

    def call() -> Any:
        outputs = compiled(*arrays)
        for output, index in program.carry:
            arrays[index] = outputs[output]
        return outputs

    times = time_calls(call, seconds=seconds, calls=calls)
    scale = 1 / program.repeats
    return Times(times.median * scale, times.low * scale, times.high * scale)


def measure_rates(*, is_dry: bool) -> Rates:
    """Measure a plain copy and a plain matrix product, of random values: zeros are faster."""
    size, width = (2**12, 64) if is_dry else (2**30, 8192)
    seconds, key = (0.01, jax.random.key(1)) if is_dry else (1.0, jax.random.key(1))
    x = jax.random.normal(key, (size,), jnp.bfloat16)
    copy = jax.jit(jnp.negative)
    copied = time_calls(lambda: copy(x), seconds=seconds)
    a, b = jax.random.normal(key, (2, width, width), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    multiplied = time_calls(lambda: product(a, b), seconds=seconds)
    return Rates(2 * x.nbytes / copied.median, 2 * width**3 / multiplied.median)
