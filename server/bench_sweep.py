"""The points of a sweep, in groups along its axis, and where the knee of each group is."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from paged.server.bench_chart import Chart, Series

type Point = Mapping[str, Any]
"""`values` by name, as they were written; then the figures of a run, or an `error`."""

NOTE = "note"
_LOG_FROM = 8  # greatest value over least


def combinations(variations: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """Return every combination of the values, the last name's changing fastest."""
    names = [name for name, _ in variations]
    lists = [values for _, values in variations]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*lists)]


def groups(points: Sequence[Point], axis: str) -> dict[str, list[Point]]:
    """Return the points that differ in `axis` alone, by the other values; without failed ones."""
    found: dict[str, list[Point]] = {}
    for point in points:
        rest = ", ".join(f"{k} {v}" for k, v in point["values"].items() if k != axis)
        if "error" not in point:
            found.setdefault(rest, []).append(point)
    return found


def power(point: Point) -> float:
    """Return requests per second by the mean time of a request, 1/s²: greatest at the knee.

    Before it, more load costs little time and is served; behind it, it waits.

    Source: Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in
    computer communications", ICC 1979.
    """
    return float(point["request_throughput"] / point["mean_e2el_ms"] * 1e3)


def knees(points: Sequence[Point], axis: str) -> list[Point]:
    """Return the point of greatest power of every group of three points or more."""
    return [max(group, key=power) for group in groups(points, axis).values() if len(group) > 2]


def best_goodput(points: Sequence[Point]) -> Point | None:
    """Return the point at which most requests per second keep the objectives, if there are some."""
    known = [point for point in points if point.get("request_goodput")]
    return max(known, key=lambda point: float(point["request_goodput"])) if known else None


def table(points: Sequence[Point], found: Sequence[Point]) -> list[dict[str, str]]:
    """Return the cells of all points by their headings, the note last; `found` are the knees."""
    rows = [_row(point, is_knee=point in found) for point in points]
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != NOTE]
    return [{name: row.get(name, "") for name in (*columns, NOTE)} for row in rows]


def _row(point: Point, *, is_knee: bool) -> dict[str, str]:
    cells = dict(point["values"])
    if "error" in point:
        return cells | {NOTE: point["error"]}
    cells |= {
        "req/s": f"{point['request_throughput']:.2f}",
        "out tok/s": f"{point['output_throughput']:.1f}",
        "TTFT p50 ms": _ms(point["p50_ttft_ms"]),
        "TTFT p99 ms": _ms(point["p99_ttft_ms"]),
        "TPOT p50 ms": _ms(point["p50_tpot_ms"]),
        "E2EL p50 ms": _ms(point["p50_e2el_ms"]),
    }
    if point["request_goodput"] is not None:
        cells["good req/s"] = f"{point['request_goodput']:.2f}"
    if point["total_cached_tokens"]:
        cells["cached %"] = (
            f"{100 * point['total_cached_tokens'] / point['total_input_tokens']:.1f}"
        )
    return cells | {"failed": str(point["failed"]), NOTE: "knee" if is_knee else ""}


def charts(points: Sequence[Point], axis: str, knee: Point | None) -> list[Chart]:
    """Return charts along the axis, a line per group; values that are no numbers are counted."""
    of_group = groups(points, axis)
    texts = list(dict.fromkeys(point["values"][axis] for point in points))
    places = _places(texts)
    label = axis if _numbers(texts) else f"{axis}: {', '.join(texts)}"
    mark = None if knee is None else (places[knee["values"][axis]], "knee")
    is_log = min(places.values()) > 0 and max(places.values()) >= _LOG_FROM * min(places.values())

    def along(title: str, unit: str, fields: Mapping[str, str]) -> Chart:
        series = [
            Series(
                ", ".join(filter(None, (name, rest))),
                sorted((places[p["values"][axis]], p[key]) for p in group if p[key] is not None),
            )
            for rest, group in of_group.items()
            for name, key in fields.items()
        ]
        return Chart(title, label, unit, series, mark, log_x=is_log)

    shown = [
        along("Output tokens", "tokens per second", {"": "output_throughput"}),
        along("Requests", "requests per second", {"": "request_throughput"}),
        along("Time to first token", "ms", {"p50": "p50_ttft_ms", "p99": "p99_ttft_ms"}),
        along("Time per output token", "ms", {"p50": "p50_tpot_ms", "p99": "p99_tpot_ms"}),
        Chart(
            "What throughput costs", "output tokens per second", "E2EL p50, ms",
            [
                Series(rest, [(p["output_throughput"], p["p50_e2el_ms"]) for p in group])
                for rest, group in of_group.items()
            ],
            None if knee is None else (knee["output_throughput"], "knee"),
        ),
    ]  # fmt: skip
    if best_goodput(points) is not None:
        shown.append(along("Goodput", "requests per second", {"": "request_goodput"}))
    return shown


def _places(texts: Sequence[str]) -> dict[str, float]:
    numbers = _numbers(texts) or [float(index) for index in range(1, len(texts) + 1)]
    return dict(zip(texts, numbers, strict=True))


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Return the values if all are finite numbers."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if all(abs(number) < float("inf") for number in numbers) else None


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
