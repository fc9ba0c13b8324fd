"""What `/metrics` shows of the tiers: every number worked out from what was moved."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.host_blocks import HostBlocks
from paged.scheduler.tiers.manager import TierManager
from paged.server.tier_metrics import TierMetrics
from tests.scheduler.tiers.fakes import BLOCK_BYTES, Bench, FakeDevice, name

KEYS = [name(number) for number in range(9)]
LABELS = {"model_name": "m", "engine": "0"}
STAGE = 'num_requests_kv_fetch_by_stage{stage="%s"}'


class TimedDevice(FakeDevice):
    """Takes two seconds to bring blocks to the host, and three for the other way."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def fetch(self, gathered: object) -> HostBlocks:
        blocks = super().fetch(gathered)
        self.now += 2
        return blocks

    def stage(self, blocks, block_ids) -> object:
        staged = super().stage(blocks, block_ids)
        self.now += 3
        return staged


class Page:
    """A manager with room for two blocks in host memory, and what is shown of it."""

    def __init__(self, folder: Path | None) -> None:
        self.device = TimedDevice()
        disk = folder and DiskTier(
            folder, namespace="n", block_bytes=BLOCK_BYTES, capacity_bytes=10_000
        )
        self.manager = TierManager(
            self.device,
            host=HostTier(2 * BLOCK_BYTES, BLOCK_BYTES),
            disk=disk,
            max_inflight_bytes=4 * BLOCK_BYTES,
            clock=self.device.clock,
        )
        self.bench = Bench(self.manager, self.device)
        self.registry = CollectorRegistry()
        TierMetrics(LABELS, self.registry, self.manager.stats)
        self.manager.flush(20)

    def values(self) -> dict[str, float]:
        """Value by name, labels cut to those that not every series has."""
        values = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                own = {key: value for key, value in sample.labels.items() if key not in LABELS}
                assert len(sample.labels) == len(own) + 2
                labels = ",".join(f'{key}="{value}"' for key, value in own.items())
                short = sample.name.removeprefix("vllm:").removeprefix("kv_offload_")
                values[short + (f"{{{labels}}}" if own else "")] = sample.value
        return values


def check(got: dict[str, float], expected: dict[str, float]) -> None:
    assert {name: got.get(name) for name in expected} == expected


def test_blocks_through_host_memory_and_disk(tmp_path):
    page = Page(tmp_path)
    try:
        # Three go down at once, of which the host gives the first on to the disk; then a fourth.
        page.bench.evict(*KEYS[:3])
        page.manager.flush(20)
        page.bench.evict(KEYS[3])
        page.manager.flush(20)
        # Two on the disk, two in memory, and the fifth is nowhere.
        assert page.manager.lookup(KEYS[:5]) == ["disk", "disk", "host", "host"]
        assert page.manager.lookup([KEYS[8]]) == []
        page.bench.load(KEYS[2], KEYS[3])
        page.bench.load(KEYS[0], first_block=40)
        page.manager.flush(20)
        check(
            page.values(),
            {
                "store_bytes_total": 4 * BLOCK_BYTES,
                "store_time_total": 4,
                "store_size_count": 2,
                "store_size_sum": 4 * BLOCK_BYTES,
                "cpu_allocation_size_count": 2,
                "cpu_allocation_size_sum": 4,
                'cpu_allocation_size_bucket{le="1.0"}': 1,
                'cpu_allocation_size_bucket{le="2.0"}': 1,
                'cpu_allocation_size_bucket{le="5.0"}': 2,
                "load_bytes_total": 3 * BLOCK_BYTES,
                "load_time_total": 6,
                "load_size_count": 2,
                "load_size_sum": 3 * BLOCK_BYTES,
                "lookup_sync_delay_seconds_count": 2,
                "lookup_sync_delay_seconds_sum": 0,
                "allocation_failure_total": 0,
                "cpu_cache_usage_perc": 1,
                "cpu_cache_read_usage_perc": 0,
                "cpu_cache_write_usage_perc": 0,
                # The first look-up may bring four at once, so it does not ask for the fifth.
                'tiering_chunk_queries_total{tier="0:primary"}': 4 + 1,
                'tiering_chunk_hits_total{tier="0:primary"}': 2,
                'tiering_chunk_queries_total{tier="1:fs"}': 2 + 1,
                'tiering_chunk_hits_total{tier="1:fs"}': 2,
                # The block that was read from the disk has put one more of the host's there.
                'tiering_write_bytes_total{tier="1:fs"}': 3 * BLOCK_BYTES,
                'tiering_read_bytes_total{tier="1:fs"}': BLOCK_BYTES,
                'tiering_promotion_job_failures_total{tier="1:fs"}': 0,
                'tiering_cascade_job_failures_total{tier="1:fs"}': 0,
            },
        )
    finally:
        page.manager.close()


def test_loads_by_stage_and_what_is_being_read(tmp_path):
    page = Page(None)
    try:
        page.bench.evict(KEYS[0])
        page.manager.flush(20)
        page.device.may_stage.clear()
        page.manager.start_load("a", KEYS[:1], [40])
        assert page.device.is_staging.wait(20)
        page.manager.start_load("b", KEYS[:1], [41])
        check(
            page.values(),
            {
                STAGE % "waiting_to_start": 1,
                STAGE % "in_progress": 1,
                STAGE % "completed_waiting": 0,
                # The second load keeps it where it is.
                "cpu_cache_read_usage_perc": 0.5,
                "cpu_cache_usage_perc": 0.5,
            },
        )
        page.device.may_stage.set()
        assert page.manager.wait(20)
        while page.values()[STAGE % "completed_waiting"] < 2:
            pass
        assert page.values()["cpu_cache_read_usage_perc"] == 0
        page.bench.take()
        assert page.values()[STAGE % "completed_waiting"] == 0
    finally:
        page.device.may_stage.set()
        page.manager.close()


def test_blocks_that_are_not_kept_are_failures(tmp_path):
    page = Page(None)
    try:
        page.bench.evict(*KEYS[:6])  # four may be on their way at once
        page.manager.flush(20)
        assert page.values()["allocation_failure_total"] == 2
        page.device.fails = True
        page.bench.evict(KEYS[7])
        page.manager.flush(20)
        assert page.values()["allocation_failure_total"] == 3
    finally:
        page.manager.close()


def test_disk_that_fails(tmp_path):
    page = Page(tmp_path)
    try:
        page.bench.evict(*KEYS[:4])
        page.manager.flush(20)
        files = list(tmp_path.rglob("*.kv"))
        assert len(files) == 2
        for file in files:
            file.write_bytes(b"broken")
        assert page.bench.load(KEYS[0]).num_blocks_ok == 0
        got = page.values()
        assert got['tiering_promotion_job_failures_total{tier="1:fs"}'] == 1
        assert got['tiering_read_bytes_total{tier="1:fs"}'] == 0
    finally:
        page.manager.close()


def test_page_of_an_engine_without_tiers_has_no_such_series():
    registry = CollectorRegistry()
    TierMetrics(LABELS, registry, lambda: None)
    assert generate_latest(registry) == b""
