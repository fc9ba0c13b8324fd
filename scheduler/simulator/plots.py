"""Figures of results; matplotlib, from the extra `plot`, is imported only when one is drawn."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paged.scheduler.simulator.result import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 2000


def plot_results(results: Sequence[SimulationResult]) -> "Figure":
    """Return a figure of three plots: hit rates, KV occupancy over time, latency.

    Occupancy and latency are those of the first result's capacity: more lines would hide another.
    Notebooks show it as it is; `figure.savefig(path)` writes it, the suffix choosing the format.

    Raises:
      ValueError: without any result.
      ImportError: if matplotlib is not installed.
    """
    if not results:
        raise ValueError("there are no results to plot; run a simulation first.")
    figure = _new_figure(figsize=(15, 4.5), layout="constrained")
    hits, occupancy, latency = figure.subplots(1, 3)
    shown = [result for result in results if result.num_blocks == results[0].num_blocks]
    plot_hit_rates(hits, results)
    plot_occupancy(occupancy, shown)
    plot_latency(latency, shown, "e2e")
    figure.suptitle(results[0].trace)
    return figure


def plot_hit_rates(axes: "Axes", results: Sequence[SimulationResult]) -> None:
    """Draw the hit rate by capacity, a line per policy; bars if there is one capacity only."""
    policies = list(dict.fromkeys(result.policy for result in results))
    if len({result.num_blocks for result in results}) == 1:
        axes.bar(policies, [100 * result.hit_rate for result in results])
        axes.tick_params(axis="x", rotation=45)
    else:
        for policy in policies:
            of_policy = sorted(
                (result.num_blocks, 100 * result.hit_rate)
                for result in results
                if result.policy == policy
            )
            axes.plot(*zip(*of_policy, strict=True), marker="o", label=policy)
        axes.set_xlabel("KV blocks")
        axes.legend()
    axes.set_ylabel("prefix hits, % of prompt tokens")
    axes.set_ylim(bottom=0)


def plot_occupancy(axes: "Axes", results: Sequence[SimulationResult]) -> None:
    """Draw the share of referenced blocks over time, a line per result."""
    for result in results:
        steps = result.steps
        # A drawing has no room for a million points.
        every = max(1, len(steps) // _MAX_POINTS)
        start = steps.column("start_seconds")[::every]
        used = steps.column("used_blocks")[::every]
        axes.plot(start, 100 * used / steps.num_usable_blocks, label=_label(result), lw=1)
    axes.set_xlabel("steps" if results[0].device == "steps" else "seconds")
    axes.set_ylabel("KV blocks in use, %")
    axes.set_ylim(0, 101)
    axes.legend(fontsize="small")


def plot_latency(axes: "Axes", results: Sequence[SimulationResult], name: str) -> None:
    """Draw the share of requests (tokens, for "itl") whose time is at most x."""
    for result in results:
        seconds, share = result.latencies[name].cdf()
        axes.step(seconds, 100 * share, where="post", label=_label(result), lw=1)
    unit = "steps" if results[0].device == "steps" else "seconds"
    axes.set_xlabel(f"{name}, {unit}")
    axes.set_ylabel("share at most that long, %")
    axes.legend(fontsize="small")


def _label(result: SimulationResult) -> str:
    return f"{result.policy}, {result.num_blocks} blocks"


def _new_figure(**options: Any) -> "Figure":
    # Not pyplot, which would choose a screen.
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib; install the extra `plot`: pip install 'paged[plot]'"
        ) from error
    figure: Figure = module.Figure(**options)
    return figure
