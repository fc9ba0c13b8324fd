"""When each request was sent and its outputs came, and what follows from that: TTFT, TPOT, ITL.

All three benchmarks keep their books here. Definitions and field names are vLLM's.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paged.server.bench_names import PERCENTILES


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One request, from its sending to its last output; filled as it goes.

    Attributes:
      num_prompt_tokens: length of the prompt.
      num_output_tokens: tokens generated, which may be more than outputs came.
      sent: seconds of a monotonic clock.
      arrivals: the same clock, whenever some output came.
      finished: whether the last of `arrivals` is the end.
      error: why it failed.
      counted_by_server: whether the token counts are a server's; otherwise outputs were counted.
      num_cached_tokens: prompt tokens from the prefix cache; None if nobody says.
      request_id: sent as X-Request-Id; None: none is.
      pieces: the text as it came, where it is needed for the next turn.
    """

    num_prompt_tokens: int
    num_output_tokens: int = 0
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    counted_by_server: bool = False
    num_cached_tokens: int | None = None
    request_id: str | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first output."""
        return self.arrivals[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last output."""
        return self.arrivals[-1] - self.sent

    @property
    def itls(self) -> list[float]:
        """Seconds between each output and the one before."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)


def meets(timeline: Timeline, objectives: Mapping[str, float]) -> bool:
    """Return whether a request is at most as slow as its objectives, milliseconds by metric.

    A request of one token has no TPOT, and keeps any.
    """
    return all(
        1e3 * (getattr(timeline, name) or 0.0) <= bound for name, bound in objectives.items()
    )


def cached_tokens(timelines: Sequence[Timeline]) -> int | None:
    """Return the prompt tokens that came from the prefix cache; None if the server never said."""
    told = [t.num_cached_tokens for t in timelines if t.num_cached_tokens is not None]
    return sum(told) if told else None


def seconds_of(timelines: Sequence[Timeline]) -> dict[str, list[float]]:
    """Return the values of each of `METRICS`, seconds; gaps of all requests are pooled."""
    return {
        "ttft": [timeline.ttft for timeline in timelines],
        "tpot": [value for timeline in timelines if (value := timeline.tpot) is not None],
        "itl": [gap for timeline in timelines for gap in timeline.itls],
        "e2el": [timeline.e2el for timeline in timelines],
    }


def percentile_name(percent: float) -> str:
    """Return what a percentile is called: p99, p99.9."""
    return f"p{percent:g}"


def latency_fields(
    timelines: Sequence[Timeline], percentiles: Sequence[float] = ()
) -> dict[str, float | None]:
    """Return `mean_ttft_ms`, `p99_itl_ms` and so on, milliseconds; None where nothing was seen.

    Percentiles lie between neighbours in proportion, as NumPy's do by default. The median is `p50`
    under the name that vLLM gives it.

    Args:
      timelines: of requests that succeeded.
      percentiles: beside `PERCENTILES`, which are always there.
    """
    fields: dict[str, float | None] = {}
    percents = sorted({*PERCENTILES, *percentiles})
    statistics = ("mean", "median", "std", *map(percentile_name, percents))
    for metric, seconds in seconds_of(timelines).items():
        values = 1e3 * np.array(seconds, np.float64)
        found: dict[str, float | None] = dict.fromkeys(statistics)
        if len(values):
            found_percentiles = np.percentile(values, percents).tolist()
            numbers = [values.mean(), np.median(values), values.std(), *found_percentiles]
            found = {name: float(n) for name, n in zip(statistics, numbers, strict=True)}
        fields |= {f"{name}_{metric}_ms": value for name, value in found.items()}
    return fields


def peak_tokens_per_second(timelines: Sequence[Timeline]) -> float:
    """Return the most output tokens of any whole second, counted from the first request on.

    The tokens of a request are spread evenly over its outputs.
    """
    start = min(timeline.sent for timeline in timelines)
    tokens = np.zeros(int(max(timeline.arrivals[-1] for timeline in timelines) - start) + 1)
    for timeline in timelines:
        seconds = (np.array(timeline.arrivals) - start).astype(np.int64)
        np.add.at(tokens, seconds, timeline.num_output_tokens / len(seconds))
    return float(tokens.max())


def peak_concurrency(timelines: Sequence[Timeline]) -> int:
    """Return the most requests under way at one moment (vLLM: within one second)."""
    changes = [(timeline.sent, 1) for timeline in timelines]
    # One that ends when another begins makes room for it: ends sort first.
    changes += [(timeline.arrivals[-1], -1) for timeline in timelines]
    return int(np.cumsum([change for _, change in sorted(changes)]).max())
