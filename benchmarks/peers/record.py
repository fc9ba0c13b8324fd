"""What a comparison comes to: medians, ratios, whether targets are met, and the table of it all."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.workloads import Workload

_NONE = "-"


def times_better(ours: float, theirs: float, *, is_lower_better: bool) -> float:
    """Return how many times better our figure is; below 1 it is worse."""
    return theirs / ours if is_lower_better else ours / theirs


def result_of(
    workload: Workload,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    """Return the record of one workload.

    Args:
      workload: what was measured.
      runs: of each competitor, one per round; each has its "figure", and what else was noted.
      errors: why competitors have no runs, or not all.
    """
    medians = {
        name: statistics.median(run["figure"] for run in theirs)
        for name, theirs in runs.items()
        if theirs
    }
    ours = workload.ours
    comparisons = {
        peer: _comparison(workload, medians, runs, peer)
        for peer in workload.peers
        if peer in medians and ours in medians
    }
    return {
        "workload": workload.name,
        "unit": workload.unit,
        "ours": ours,
        "peers": list(workload.peers),
        "must": workload.must,
        "goal": workload.goal,
        "bounds_figure": workload.bounds_figure,
        "medians": medians,
        "comparisons": comparisons,
        "errors": dict(errors),
        "runs": {name: list(theirs) for name, theirs in runs.items()},
    }


def _comparison(
    workload: Workload,
    medians: Mapping[str, float],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    peer: str,
) -> dict[str, Any]:
    pairs = [
        times_better(a["figure"], b["figure"], is_lower_better=workload.is_lower_better)
        for a, b in zip(runs[workload.ours], runs[peer], strict=False)
    ]
    ratio = times_better(
        medians[workload.ours], medians[peer], is_lower_better=workload.is_lower_better
    )
    return {
        "ratio": ratio,
        "rounds": pairs,
        "first_tokens_agree": _agreement(runs[workload.ours], runs[peer]),
    }


def _agreement(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the share of prompts whose first tokens are the same; None where one side is mute."""
    same = [
        a == b
        for mine, other in zip(ours, theirs, strict=False)
        for a, b in zip(mine["first_tokens"], other["first_tokens"], strict=False)
    ]
    return statistics.mean(same) if same else None


def verdict(result: Mapping[str, Any], peer: str | None) -> str:
    """Return "goal", "must" or "missed", or "-" where there is no target or no figure."""
    if result["must"] is None or peer not in (None, *result["peers"][:1]):
        return _NONE
    if result["bounds_figure"]:
        value, sign = result["medians"].get(result["ours"]), -1
    else:
        value, sign = result["comparisons"].get(peer, {}).get("ratio"), 1
    if value is None:
        return _NONE
    for name in ("goal", "must"):
        if sign * value >= sign * result[name]:
            return name
    return "missed"


def markdown_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return one row per workload and peer; what could not be measured is said below."""
    lines = [
        "| workload | unit | paged | peer | its figure | times better (rounds) | must | goal | met "
        "| same first token | others' load |",
        "|---" * 11 + "|",
    ]
    problems: dict[str, None] = {}
    for result in results:
        peers = [peer for peer in result["peers"] if peer in result["runs"]] or [None]
        lines += ["| " + " | ".join(_cells(result, peer)) + " |" for peer in peers]
        for name, error in result["errors"].items():
            problems[f"- {result['workload']}, {name}: {error.splitlines()[0]}"] = None
    if problems:
        lines += ["", *problems]
    return "\n".join(lines)


def _cells(result: Mapping[str, Any], peer: str | None) -> list[str]:
    comparison = result["comparisons"].get(peer)
    has_target = peer in (None, *result["peers"][:1])
    sign = "at most " if result["bounds_figure"] else ""
    targets = [
        f"{sign}{result[name]:g}" if has_target and result[name] is not None else _NONE
        for name in ("must", "goal")
    ]
    loads = [
        run["foreign_cores"]
        for name in (result["ours"], peer)
        for run in result["runs"].get(name, ())
    ]
    agreement = None if comparison is None else comparison["first_tokens_agree"]
    return [
        result["workload"],
        result["unit"],
        _number(result["medians"].get(result["ours"])),
        peer or _NONE,
        _number(result["medians"].get(peer)),
        _NONE if comparison is None else _ratio(comparison),
        *targets,
        verdict(result, peer),
        _NONE if agreement is None else f"{agreement:.0%}",
        f"{min(loads):.2f} to {max(loads):.2f}" if loads else _NONE,
    ]


def _ratio(comparison: Mapping[str, Any]) -> str:
    rounds = comparison["rounds"]
    return f"{comparison['ratio']:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
