"""Times of a simulation and their percentiles; repeated values are counted, not repeated."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Mean and percentiles of a time, in seconds; all 0 if it was never measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class LatencyRecorder:
    """Collects one kind of time (mutable)."""

    def __init__(self) -> None:
        self._values = array("d")
        self._counts = array("q")

    def add(self, seconds: float, count: int = 1) -> None:
        """Record that `count` times had this length."""
        self._values.append(seconds)
        self._counts.append(count)

    def cdf(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct times, ascending, and the share of all that are at most that long."""
        values, index = np.unique(np.array(self._values), return_inverse=True)
        counts = np.bincount(index, weights=np.array(self._counts), minlength=len(values))
        return values, np.cumsum(counts) / max(counts.sum(), 1)

    def summary(self) -> LatencySummary:
        """Return mean and percentiles, interpolated linearly as `numpy.percentile` does."""
        counts = np.array(self._counts, np.int64)
        total = int(counts.sum())
        if not total:
            return LatencySummary()
        values = np.array(self._values)
        order = np.argsort(values, kind="stable")
        values, ends = values[order], np.cumsum(counts[order])
        p50, p90, p99 = _at(values, ends, np.array([50.0, 90.0, 99.0]) / 100 * (total - 1))
        mean = float(np.dot(np.array(self._values), counts)) / total
        return LatencySummary(mean, p50, p90, p99)


def _at(values: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> Sequence[float]:
    """Return the values at fractional positions of the list with repetitions."""
    low = np.floor(positions).astype(np.int64)
    lower = values[np.searchsorted(ends, low, side="right")]
    upper = values[np.searchsorted(ends, np.minimum(low + 1, ends[-1] - 1), side="right")]
    found: list[float] = (lower + (upper - lower) * (positions - low)).tolist()
    return found
