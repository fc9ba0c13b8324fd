"""`TierMetrics`: what `/metrics` shows of the memory below the device, read when it is asked for.

Source: the names are those of vLLM's offloading connector, `v1/kv_offload`, and of its tiers.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from paged.scheduler.tiers.figures import (
    LOOKUP_SECONDS,
    Delays,
    MediumStats,
    TierStats,
    Transfers,
)

# As the reference numbers them: what copies to the device comes first.
_TIER_NAMES = {"host": "0:primary", "disk": "1:fs"}
_SIZES = tuple(float(1 << bits) for bits in range(16, 34, 2))  # bytes, 64 KiB to 4 GiB
_BLOCKS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")

type _TierCounter = tuple[str, str, Callable[[MediumStats], float]]

_OF_ALL_TIERS: tuple[_TierCounter, ...] = (
    ("chunk_queries", "Blocks that a tier was asked for.", lambda tier: tier.num_queries),
    ("chunk_hits", "Blocks that a tier was asked for and had.", lambda tier: tier.num_found),
)
# What moves between the host and the device has metrics of its own.
_BELOW_THE_HOST: tuple[_TierCounter, ...] = (
    ("read_bytes", "Bytes read from a tier.", lambda tier: tier.reads.num_bytes),
    ("read_time", "Seconds of reading from a tier.", lambda tier: tier.reads.seconds),
    ("write_bytes", "Bytes written to a tier.", lambda tier: tier.writes.num_bytes),
    ("write_time", "Seconds of writing to a tier.", lambda tier: tier.writes.seconds),
    (
        "promotion_job_failures",
        "Reads from a tier that failed.",
        lambda tier: tier.num_failed_reads,
    ),
    ("cascade_job_failures", "Writes to a tier that failed.", lambda tier: tier.num_failed_writes),
)


class TierMetrics(Collector):
    """The series of the tiers, in a registry.

    Args:
      labels: of every series.
      registry: that shows them.
      read: returns the figures as they are now, None if there are none.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        registry: CollectorRegistry,
        read: Callable[[], TierStats | None],
    ) -> None:
        self._labels = dict(labels)
        self._read = read
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering reads no figures."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as the registry asks for them."""
        stats = self._read()
        if stats is None:
            return
        yield from self._transfers("load", "to the device", stats.loads, stats.block_bytes)
        yield from self._transfers("store", "from the device", stats.saves, stats.block_bytes)
        yield self._histogram(
            "kv_offload_cpu_allocation_size", "Blocks per store.", _BLOCKS, stats.saves.by_blocks
        )
        yield self._delays(stats.lookups)
        yield self._counter(
            "kv_offload_allocation_failure",
            "Evicted blocks that were not kept: too many were on their way, or there was no room.",
            stats.num_saves_dropped + stats.num_saves_failed,
        )
        if (host := stats.media.get("host")) is not None:
            yield from self._host(host, stats.block_bytes)
        yield from self._tiering(stats.media)
        yield self._family(
            GaugeMetricFamily,
            "num_requests_kv_fetch_by_stage",
            "Requests whose prefix is on its way to the device.",
            dict(zip(_STAGES, stats.load_stages, strict=True)),
            label="stage",
        )

    def _transfers(
        self, kind: str, where: str, transfers: Transfers, block_bytes: int
    ) -> Iterator[Metric]:
        name = f"kv_offload_{kind}"
        yield self._counter(
            f"{name}_bytes", f"Bytes of KV blocks copied {where}.", transfers.num_bytes
        )
        yield self._counter(f"{name}_time", f"Seconds of copies {where}.", transfers.seconds)
        sizes = {blocks * block_bytes: count for blocks, count in transfers.by_blocks.items()}
        yield self._histogram(f"{name}_size", f"Bytes per copy {where}.", _SIZES, sizes)

    def _host(self, host: MediumStats, block_bytes: int) -> Iterator[Metric]:
        num_slots = host.capacity_bytes // block_bytes
        for name, text, share in (
            ("", "holds blocks", host.num_bytes / host.capacity_bytes),
            ("_read", "is being read", host.num_reading / num_slots),
            ("_write", "is being written", host.num_writing / num_slots),
        ):
            yield self._family(
                GaugeMetricFamily,
                f"kv_offload_cpu_cache{name}_usage_perc",
                f"Share of the host memory for KV blocks that {text}, 0 to 1.",
                {"": share},
            )

    def _tiering(self, media: Mapping[str, MediumStats]) -> Iterator[Metric]:
        below_the_host = {name: stats for name, stats in media.items() if name != "host"}
        for counters, shown in ((_OF_ALL_TIERS, media), (_BELOW_THE_HOST, below_the_host)):
            for name, text, value in counters if shown else ():
                yield self._family(
                    CounterMetricFamily,
                    f"kv_offload_tiering_{name}",
                    text,
                    {_TIER_NAMES[medium]: value(stats) for medium, stats in shown.items()},
                    label="tier",
                )

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, {"": value})

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        *,
        label: str = "",
    ) -> Metric:
        """Return a metric; `values` by the value of its own label, by "" if it has none."""
        family = kind(f"vllm:{name}", text, labels=[*self._labels, *filter(None, [label])])
        for own, value in values.items():
            family.add_metric([*self._labels.values(), *filter(None, [own])], value)
        return family

    def _delays(self, delays: Delays) -> Metric:
        return self._cumulated(
            "kv_offload_lookup_sync_delay_seconds",
            "How long the engine was held up by looking a prompt up below the device.",
            LOOKUP_SECONDS,
            delays.counts,
            delays.seconds,
        )

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], values: Mapping[int, int]
    ) -> Metric:
        counts = [
            sum(count for value, count in values.items() if low < value <= high)
            for low, high in itertools.pairwise((0.0, *bounds, float("inf")))
        ]
        total = sum(value * count for value, count in values.items())
        return self._cumulated(name, text, bounds, counts, total)

    def _cumulated(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
        buckets = list(zip(names, map(float, itertools.accumulate(counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets, total)
        return family
