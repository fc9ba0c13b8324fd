"""`SimulationResult`: what a simulation found, as numbers, as a dictionary and as one row."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from paged.scheduler.simulator.latency import LatencyRecorder, LatencySummary
from paged.scheduler.simulator.step_log import StepLog

LATENCIES = ("ttft", "itl", "tpot", "e2e")
"""Time to first token; gap between two tokens; mean gap of a request; arrival to end."""


@dataclass(slots=True)
class PassStats:
    """Prompts of one pass and their prefix hits, at their first scheduling (mutable).

    Attributes:
      num_requests: requests that were scheduled.
      prompt_tokens, hit_tokens: tokens looked up and found.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True)
class Totals:
    """Counts over a whole simulation (mutable while it runs).

    Attributes:
      num_finished: requests that ended.
      num_rejected: requests that could never fit, and were left out.
      num_truncated: requests that reached `max_model_len` before their output's end.
      output_tokens: tokens sampled.
      computed_tokens: tokens of all steps.
      recomputed_tokens: those among them that had been computed before a preemption.
      num_preemptions: times a request lost its blocks.
    """

    num_finished: int = 0
    num_rejected: int = 0
    num_truncated: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class SimulationResult:
    """What one simulation found.

    Attributes:
      trace, policy, num_blocks, block_size, device: what was simulated; `device` is the name of
        the cost model, "steps" if every step counted as one second.
      passes: by pass index.
      totals: counts.
      duration_seconds: from the first arrival to the last end, simulated.
      latencies: recorders by name, see `LATENCIES`.
      steps: every step.
    """

    trace: str
    policy: str
    num_blocks: int
    block_size: int
    device: str
    steps: StepLog
    passes: list[PassStats] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    duration_seconds: float = 0.0
    latencies: dict[str, LatencyRecorder] = field(
        default_factory=lambda: {name: LatencyRecorder() for name in LATENCIES}
    )

    @property
    def num_requests(self) -> int:
        """Requests that were scheduled."""
        return sum(stats.num_requests for stats in self.passes)

    @property
    def prompt_tokens(self) -> int:
        """Tokens looked up in the prefix cache."""
        return sum(stats.prompt_tokens for stats in self.passes)

    @property
    def hit_tokens(self) -> int:
        """Tokens found there."""
        return sum(stats.hit_tokens for stats in self.passes)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def latency(self, name: str) -> LatencySummary:
        """Return mean and percentiles of one of `LATENCIES`."""
        return self.latencies[name].summary()

    def to_row(self) -> dict[str, Any]:
        """Return `to_dict` without nesting, as a line of a table."""
        row: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if isinstance(value, dict):
                row |= {f"{name}_{inner}": number for inner, number in value.items()}
            elif name == "passes":
                row |= {f"hit_tokens_{i}": one["hit_tokens"] for i, one in enumerate(value)}
            else:
                row[name] = value
        return row

    def per_second(self, count: int) -> float:
        """Return a count divided by the simulated time, 0 if no time passed."""
        return count / self.duration_seconds if self.duration_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the time series, ready for JSON; times in seconds."""
        totals = dataclasses.asdict(self.totals)
        return {
            "trace": self.trace,
            "policy": self.policy,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "device": self.device,
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
            "passes": [dataclasses.asdict(stats) for stats in self.passes],
            **totals,
            "num_steps": len(self.steps),
            "duration_seconds": self.duration_seconds,
            "requests_per_second": self.per_second(self.totals.num_finished),
            "output_tokens_per_second": self.per_second(self.totals.output_tokens),
            "mean_kv_usage": self.steps.mean_usage(),
            "mean_kv_waste": self.steps.mean_waste(),
            **{name: dataclasses.asdict(self.latency(name)) for name in LATENCIES},
        }
