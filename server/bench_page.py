"""A result as one HTML page: figures, tables and charts, without anything to load."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from paged.server.bench_chart import Chart, Series, distribution
from paged.server.bench_names import METRICS, PERCENTILES
from paged.server.bench_timeline import Timeline, percentile_name, seconds_of

_TEMPLATE = pathlib.Path(__file__).with_name("bench_page.html")
_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
_MAX_BUCKETS = 120


def run_page(
    title: str,
    lines: Mapping[str, object],
    result: Mapping[str, Any],
    timelines: Sequence[Timeline],
    *,
    percentiles: Sequence[float] = PERCENTILES,
) -> str:
    """Return the page of one run.

    Args:
      title: what was measured.
      lines: figures by name.
      result: with the statistics of each latency, settings and versions.
      timelines: of all requests.
      percentiles: of latencies, in the table.
    """
    statistics = ("mean", *map(percentile_name, percentiles))
    done = [timeline for timeline in timelines if timeline.finished]
    rows = [
        [
            f"{_NAMES[metric]} ({metric.upper()})",
            *(_number(result[f"{name}_{metric}_ms"]) for name in statistics),
        ]
        for metric in METRICS
    ]
    return render(
        title,
        lines,
        [("Latency, milliseconds", ["", *statistics], rows)],
        _run_charts(done),
        result,
    )


def render(
    title: str,
    lines: Mapping[str, object],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    charts: Sequence[Chart],
    result: Mapping[str, Any],
) -> str:
    """Return a page.

    Args:
      title: what was measured.
      lines: figures by name.
      tables: heading, names of the columns, rows; numbers below the first column.
      charts: in this order.
      result: what it says of settings and versions is shown below.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title,
        date=result.get("date"),
        figures=[(name, _number(value)) for name, value in lines.items()],
        tables=tables,
        charts=[chart.figure() for chart in charts],
        settings=json.dumps(result["settings"], indent=2),
        versions=result["versions"],
    )


def _run_charts(done: Sequence[Timeline]) -> list[Chart]:
    seconds = seconds_of(done)
    milliseconds = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    start = min(timeline.sent for timeline in done)
    first_tokens = [(timeline.sent - start, 1e3 * timeline.ttft) for timeline in done]
    share = "% of requests within"
    return [
        Chart(
            "Output tokens", "seconds from the start", "tokens per second",
            [Series("tokens", _token_rate(done, start), "step")],
        ),
        Chart(
            "Requests under way", "seconds from the start", "requests",
            [Series("requests", _under_way(done, start), "step")],
        ),
        Chart(
            "Time to first token", "milliseconds", share,
            [Series("TTFT", distribution(milliseconds["ttft"]), "step")], y_max=100,
        ),
        Chart(
            "Time between tokens", "milliseconds", "% within",
            [
                Series("TPOT, of requests", distribution(milliseconds["tpot"]), "step"),
                Series("ITL, of gaps", _trimmed(milliseconds["itl"]), "step"),
            ], y_max=100,
        ),
        Chart(
            "End-to-end latency", "milliseconds", share,
            [Series("E2EL", distribution(milliseconds["e2el"]), "step")], y_max=100,
        ),
        Chart(
            "First tokens, by when they were asked for", "seconds from the start", "TTFT, ms",
            [Series("TTFT", sorted(first_tokens), "dots")],
        ),
    ]  # fmt: skip


def _trimmed(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the distribution up to its 99.5th percentile: one long gap would flatten the rest."""
    points = distribution(values)
    return points[: max(1, int(len(points) * 0.995))] if points else points


def _token_rate(done: Sequence[Timeline], start: float) -> list[tuple[float, float]]:
    """Return output tokens per second, in as many spans of whole tenths of seconds as fit."""
    end = max(timeline.arrivals[-1] for timeline in done) - start
    width = max(0.1, np.ceil(10 * end / _MAX_BUCKETS) / 10)
    tokens = np.zeros(int(end / width) + 1)
    for timeline in done:
        places = ((np.array(timeline.arrivals) - start) / width).astype(np.int64)
        np.add.at(tokens, places, timeline.num_output_tokens / len(places))
    points = [(float(index * width), float(n / width)) for index, n in enumerate(tokens)]
    return [*points, (points[-1][0] + float(width), 0.0)]


def _under_way(done: Sequence[Timeline], start: float) -> list[tuple[float, float]]:
    changes = [(timeline.sent - start, 1) for timeline in done]
    changes += [(timeline.arrivals[-1] - start, -1) for timeline in done]
    changes.sort()
    counts = np.cumsum([change for _, change in changes]).tolist()
    return [(seconds, float(n)) for (seconds, _), n in zip(changes, counts, strict=True)]


def _number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
