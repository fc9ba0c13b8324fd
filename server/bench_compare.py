"""Two results side by side: ratios of their figures, and what differs in what was asked."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.server.bench_names import METRICS

# Where more is better; of everything else that is compared, less is.
_RATES = (
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "requests_per_second", "tokens_per_second", "output_tokens_per_second",
)  # fmt: skip
_STATISTICS = ("mean", "median", "p95", "p99")
_TIMES = (
    *(f"{statistic}_{metric}_ms" for metric in METRICS for statistic in _STATISTICS),
    "avg_latency",
    "error_rate",
)
# Facts of a run that are not settings.
_CONDITIONS = (
    "model_id", "endpoint", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "total_input_tokens", "total_output_tokens", "total_cached_tokens", "completed", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A figure of both sides; `change` in percent, None where the first is 0."""

    name: str
    baseline: float
    contender: float
    more_is_better: bool

    @property
    def change(self) -> float | None:
        """Percent that the contender is above the baseline."""
        if not self.baseline:
            return None if self.contender else 0.0
        return 100 * (self.contender / self.baseline - 1)

    def verdict(self, tolerance: float) -> str:
        """Return "better", "worse" or "same", which is within `tolerance` percent."""
        change = self.change
        if change is None:
            return "better" if self.more_is_better else "worse"
        if abs(change) <= tolerance:
            return "same"
        return "better" if (change > 0) == self.more_is_better else "worse"


def read_runs(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the results in a file, or in all JSON files of a folder.

    Raises: ValueError that names a file that is no result of a benchmark; OSError if it cannot be
      read.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no JSON files; write results there with --json.")
    return [_read(file) for file in files]


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if isinstance(result, dict) and "points" in result:
        raise ValueError(f"{file} is a sweep; compare results of `serve` at one load.")
    if not isinstance(result, dict) or not any(name in result for name in (*_RATES, *_TIMES)):
        raise ValueError(f"{file} has no figures of a benchmark; write it with --json.")
    return result


def compare(
    baseline: Sequence[Mapping[str, Any]], contender: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """Return every figure that all runs of both sides have, medians of the runs."""
    rows = []
    for names, more_is_better in ((_RATES, True), (_TIMES, False)):
        for name in names:
            values = [[run.get(name) for run in side] for side in (baseline, contender)]
            if all(isinstance(value, int | float) for side in values for value in side):
                first, second = (float(np.median(np.array(side, np.float64))) for side in values)
                rows.append(Row(name, first, second, more_is_better))
    return rows


def differences(
    baseline: Mapping[str, Any], contender: Mapping[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yield what was asked or counted otherwise: name, and the value of each side."""
    for name in _CONDITIONS:
        if name in baseline and name in contender and baseline[name] != contender[name]:
            yield name, baseline[name], contender[name]
    settings = [_flat(run.get("settings", {})) for run in (baseline, contender)]
    for name in settings[0]:
        if name in settings[1] and settings[0][name] != settings[1][name]:
            yield name, settings[0][name], settings[1][name]
    versions = [run.get("versions", {}) for run in (baseline, contender)]
    for name in versions[0]:
        if name in versions[1] and versions[0][name] != versions[1][name]:
            yield f"version of {name}", versions[0][name], versions[1][name]


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat
