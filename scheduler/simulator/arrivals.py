"""When requests arrive and how long they are: Poisson or bursty arrivals, lognormal lengths."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paged.scheduler.simulator.trace import Trace, TraceRequest

# Draws are made this many at a time: one by one they would cost more than the simulation.
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A lognormal distribution of lengths in tokens, cut off on both sides.

    Attributes:
      mean: mean before the cut, tokens.
      sigma: standard deviation of the logarithm.
      minimum, maximum: shorter and longer draws become these.
    """

    mean: float
    sigma: float
    minimum: int = 4
    maximum: int = 1024

    def __post_init__(self) -> None:
        if not self.mean > 0 or self.sigma < 0 or not 1 <= self.minimum <= self.maximum:
            raise ValueError(
                f"mean={self.mean} must be positive, sigma={self.sigma} at least 0, and "
                f"1 <= minimum={self.minimum} <= maximum={self.maximum}."
            )

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.rint(rng.lognormal(mu, self.sigma, count))
        drawn: list[int] = np.clip(lengths, self.minimum, self.maximum).astype(np.int64).tolist()
        return drawn


SHAREGPT_PROMPT = LengthDistribution(mean=161.0, sigma=1.3)
"""Prompts like ShareGPT's: the mean of arXiv:2309.06180, figure 11; the spread is assumed."""

SHAREGPT_OUTPUT = LengthDistribution(mean=338.0, sigma=1.0)
"""Outputs like ShareGPT's: the mean of arXiv:2309.06180, figure 11; the spread is assumed."""


def sharegpt(
    num_requests: int = 1000,
    request_rate: float = 4.0,
    burstiness: float = 1.0,
    prompt: LengthDistribution = SHAREGPT_PROMPT,
    output: LengthDistribution = SHAREGPT_OUTPUT,
    seed: int = 0,
) -> Trace:
    """Return requests that share nothing, with lengths like ShareGPT's.

    Args:
      num_requests: requests in all.
      request_rate: mean arrivals per second; infinity lets all arrive at once.
      burstiness: 1 is a Poisson process; below 1 arrivals come in bursts (see `arrival_times`).
      prompt, output: lengths, drawn independently.
      seed: of all draws.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests={num_requests} must be at least 1.")

    def generate() -> Iterator[TraceRequest]:
        rng = np.random.default_rng(seed)
        arrivals = arrival_times(request_rate, burstiness, seed + 1)
        for start in range(0, num_requests, _BATCH):
            prompts = prompt.draw(rng, _BATCH)
            outputs = output.draw(rng, _BATCH)
            for index in range(min(_BATCH, num_requests - start)):
                segment = (start + index, prompts[index])
                yield TraceRequest((segment,), outputs[index], next(arrivals))

    name = "poisson" if burstiness == 1 else "bursty"
    return Trace(name, generate, num_requests, has_arrivals=True)


def with_arrivals(
    trace: Trace, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> Trace:
    """Return the same requests in the same order with new arrival times."""

    def generate() -> Iterator[TraceRequest]:
        for request, seconds in zip(
            trace, arrival_times(request_rate, burstiness, seed), strict=False
        ):
            yield dataclasses.replace(request, arrival_seconds=seconds)

    return Trace(trace.name, generate, trace.num_requests, has_arrivals=True)


def arrival_times(request_rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Yield arrival times in seconds, without end; the first is after one gap.

    Gaps are gamma distributed with mean 1 / request_rate and shape `burstiness`: their squared
    coefficient of variation is 1 / burstiness, so 1 is a Poisson process and 0.25 a bursty one.

    Raises: ValueError if the rate or the burstiness is not positive.
    Source: the meaning of `--request-rate` and `--burstiness` in `vllm bench serve`.
    """
    for name, value in (("request_rate", request_rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be greater than 0.")
    return _arrival_times(request_rate, burstiness, seed)


def _arrival_times(request_rate: float, burstiness: float, seed: int) -> Iterator[float]:
    now = 0.0
    rng = np.random.default_rng(seed)
    while True:
        for gap in rng.gamma(burstiness, 1 / (request_rate * burstiness), _BATCH).tolist():
            now += gap
            yield now
