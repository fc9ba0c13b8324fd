"""When the requests of a load are due: at once, at a rate, or at one that rises."""

import argparse
import math

import numpy as np

from paged.server.cli_errors import UserError


def due_times(args: argparse.Namespace, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return when each request is due by the options of `serve`, seconds, float64 `[count]`.

    Raises: UserError for options that contradict each other.
    """
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise UserError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
        return arrival_times(rng, count, args.request_rate, args.burstiness)
    if start is None or end is None:
        raise UserError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
    if not start < end < math.inf:
        raise UserError(
            f"--ramp-up-end-rps {end:g} must be finite and above --ramp-up-start-rps {start:g}."
        )
    if not math.isinf(args.request_rate):
        raise UserError("--ramp-up-strategy sets the rate; leave --request-rate out.")
    rates = ramp_rates(args.ramp_up_strategy, count, start, end)
    return np.cumsum(_gaps(rng, count, args.burstiness) / rates)


def arrival_times(
    rng: np.random.Generator, count: int, request_rate: float, burstiness: float
) -> np.ndarray:
    """Return when each request is due, seconds from the start, float64 `[count]`.

    Gaps are drawn from a gamma distribution of shape `burstiness` (1 is a Poisson process, inf an
    even spacing), then stretched so that the mean rate is met exactly; the first request is due
    after the first gap. An infinite rate is all at once.

    Source: vLLM `benchmarks/serve.py`, get_request.
    """
    if math.isinf(request_rate):
        return np.zeros(count)
    gaps = _gaps(rng, count, burstiness)
    gaps *= count / request_rate / gaps.sum()
    return np.cumsum(gaps)


def ramp_rates(strategy: str, count: int, start: float, end: float) -> np.ndarray:
    """Return the rate before each request, per second, float64 `[count]`.

    From the first request to the last it rises from `start` to `end` by equal steps ("linear") or
    by equal factors ("exponential").

    Source: vLLM `benchmarks/serve.py`, _get_current_request_rate.
    """
    progress = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


def _gaps(rng: np.random.Generator, count: int, burstiness: float) -> np.ndarray:
    """Return gaps with a mean of 1."""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(burstiness, 1 / burstiness, size=count)
