"""What the benchmarks print and write, and which versions they measured."""

import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged._version import __version__
from paged.server.bench_names import METRICS, PERCENTILES
from paged.server.bench_timeline import Timeline, latency_fields, percentile_name
from paged.server.cli_errors import UserError

_WIDTH = 50


def versions() -> dict[str, str]:
    """Return the versions that a measurement in this process depends on."""
    names = ("jax", "jaxlib", "numpy", "aiohttp")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"paged": __version__, "python": platform.python_version(), **found}


def print_report(
    title: str,
    lines: Mapping[str, object],
    timelines: Sequence[Timeline],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = PERCENTILES,
) -> None:
    """Print figures by name, then mean and percentiles of latencies, milliseconds."""
    print(f"{f' {title} ':=^{_WIDTH}}")
    for name, value in lines.items():
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        print(f"{name + ':':<{_WIDTH - 11}} {text:>10}")
    fields = latency_fields(timelines, percentiles)
    columns = ["mean", *map(percentile_name, percentiles)]
    print(f"{'milliseconds':<14}" + "".join(f"{column:>9}" for column in columns))
    for metric in metrics:
        values = [fields[f"{column}_{metric}_ms"] for column in columns]
        cells = ("-" if value is None else f"{value:.1f}" for value in values)
        print(f"{metric.upper():<14}" + "".join(f"{cell:>9}" for cell in cells))
    print("=" * _WIDTH, flush=True)


def check_writable(path: pathlib.Path | None) -> None:
    """Raise UserError if a file cannot be written there: before the measurement, not after it."""
    if path is None:
        return
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()  # a run that fails leaves nothing behind
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def write_json(path: pathlib.Path | None, result: Mapping[str, Any]) -> None:
    """Write a result, if somebody wants it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def write_text(path: pathlib.Path | None, make: Callable[[], str]) -> None:
    """Write a text, if somebody wants it; it is made only then."""
    if path is not None:
        path.write_text(make(), encoding="utf-8")
