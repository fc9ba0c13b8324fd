"""Metrics that are there only if they were asked for: stays of KV blocks, and the devices' work."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from paged.scheduler.output import StepStats

_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600,
    1200, 1800,
)  # fmt: skip


class ResidencyMetrics:
    """How long a sample of the KV blocks stays with its content (`--kv-cache-metrics`).

    Args:
      labels: of every series.
      registry: that shows them.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(
                f"vllm:kv_block_{name}", text, tuple(labels), registry=registry, buckets=_SECONDS
            )
            return made.labels(**labels)

        self._lifetime = histogram(
            "lifetime_seconds", "From a KV block's allocation until others get it."
        )
        self._idle = histogram(
            "idle_before_evict_seconds", "From its last use by a request until others get it."
        )
        self._gap = histogram("reuse_gap_seconds", "Between two prefix hits of a KV block.")

    def observe(self, stats: StepStats) -> None:
        """Record one engine step."""
        for stay in stats.block_residencies:
            self._lifetime.observe(stay.lifetime_seconds)
            self._idle.observe(stay.idle_seconds)
            for gap in stay.reuse_gaps_seconds:
                self._gap.observe(gap)


class WorkMetrics:
    """Arithmetic and memory traffic of each device, by estimate (`--enable-mfu-metrics`).

    Args:
      labels: of every series.
      registry: that shows them.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            made = Counter(f"vllm:estimated_{name}", text, tuple(labels), registry=registry)
            return made.labels(**labels)

        self._flops = counter(
            "flops_per_gpu", "Operations of the model on each device, padding left out."
        )
        self._read = counter("read_bytes_per_gpu", "Weights and KV read on each device, bytes.")
        self._written = counter("write_bytes_per_gpu", "KV written on each device, bytes.")

    def observe(self, stats: StepStats) -> None:
        """Record one engine step."""
        work = stats.work
        if work.flops:
            self._flops.inc(work.flops)
            self._read.inc(work.read_bytes)
            self._written.inc(work.write_bytes)
