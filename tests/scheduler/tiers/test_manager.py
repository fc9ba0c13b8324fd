"""What the scheduler sees: evicted blocks come back with the right bytes, or are a miss."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.loads import LoadResult
from paged.scheduler.tiers.manager import TierManager
from tests.scheduler.tiers.fakes import BLOCK_BYTES, Bench, FakeDevice, name

KEYS = [name(number) for number in range(12)]


def disk_tier(folder: Path, namespace: str = "n") -> DiskTier:
    return DiskTier(folder, namespace=namespace, block_bytes=BLOCK_BYTES, capacity_bytes=10_000_000)


@contextlib.contextmanager
def opened(
    *, host_blocks: int = 0, folder: Path | None = None, inflight_blocks: int = 16
) -> Iterator[Bench]:
    device = FakeDevice()
    manager = TierManager(
        device,
        host=HostTier(host_blocks * BLOCK_BYTES, BLOCK_BYTES) if host_blocks else None,
        disk=disk_tier(folder) if folder else None,
        max_inflight_bytes=inflight_blocks * BLOCK_BYTES,
    )
    try:
        manager.flush(300)
        yield Bench(manager, device)
    finally:
        device.may_fetch.set()
        device.may_stage.set()
        manager.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_evicted_blocks_come_back(tmp_path, tier: str):
    options = {"host_blocks": 8} if tier == "host" else {"folder": tmp_path}
    with opened(**options) as bench:
        bench.evict(*KEYS[:3])
        assert bench.manager.lookup([*KEYS[:3], KEYS[5], KEYS[2]]) == [tier] * 3
        assert bench.manager.num_available(KEYS) == 3
        assert bench.manager.num_available([KEYS[5], KEYS[0]]) == 0
        result = bench.load(*KEYS[:3])
        assert (result.num_blocks_ok, result.media) == (3, (tier,) * 3)
        assert bench.manager.stats().media[tier].num_hits == 3


def test_what_the_host_gives_up_comes_back_from_the_disk_and_moves_up(tmp_path):
    with opened(host_blocks=2, folder=tmp_path) as bench:
        bench.evict(*KEYS[:5])
        bench.manager.flush(300)
        assert bench.manager.lookup(KEYS[:5]) == ["disk"] * 3 + ["host"] * 2
        assert bench.load(*KEYS[:5]).media == ("disk",) * 3 + ("host",) * 2
        bench.manager.flush(300)
        media = bench.manager.lookup(KEYS[:5])
        assert media.count("host") == 2
        assert "host" in media[:3], "a block that was read from the disk is in memory now"
        stats = bench.manager.stats()
        assert (stats.media["host"].num_hits, stats.media["disk"].num_hits) == (2, 3)
        assert stats.media["host"].num_blocks == 2
        assert stats.media["host"].num_bytes == 2 * BLOCK_BYTES


def test_restart_finds_the_blocks_of_the_disk(tmp_path):
    with opened(folder=tmp_path) as bench:
        bench.evict(*KEYS[:3])
        bench.manager.flush(300)
    with opened(folder=tmp_path) as bench:
        assert bench.load(*KEYS[:3]).num_blocks_ok == 3


def test_content_that_is_below_is_not_saved_again():
    with opened(host_blocks=4) as bench:
        bench.evict(KEYS[0])
        bench.manager.on_evict(5, KEYS[0])  # on its way or there
        assert bench.manager.take_saves() == []
        bench.manager.flush(300)
        bench.manager.on_evict(5, KEYS[0])
        assert bench.manager.take_saves() == []
        assert bench.manager.stats().media["host"].num_stores == 1


def test_two_blocks_of_one_content_are_saved_once():
    with opened(host_blocks=4) as bench:
        bench.manager.on_evict(3, KEYS[0])
        bench.manager.on_evict(4, KEYS[0])
        assert bench.manager.take_saves() == [(3, KEYS[0])]


def test_evicted_again_block_is_the_last_to_go_from_the_host():
    with opened(host_blocks=2) as bench:
        bench.evict(KEYS[0])
        bench.evict(KEYS[1])
        bench.manager.flush(300)
        bench.evict(KEYS[0])
        bench.evict(KEYS[2])
        bench.manager.flush(300)
        assert bench.manager.lookup([KEYS[0]]) == ["host"]
        assert bench.manager.lookup([KEYS[1]]) == []


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_block_is_found_while_its_save_is_on_the_way(tmp_path, tier: str):
    options = {"host_blocks": 8} if tier == "host" else {"folder": tmp_path}
    with opened(**options) as bench:
        bench.device.may_fetch.clear()
        bench.fill(1, KEYS[0])
        bench.manager.on_evict(1, KEYS[0])
        assert bench.manager.lookup(KEYS[:2]) == [tier], "recorded in this very step"
        bench.manager.start_load("r", KEYS[:1], [9])
        bench.end_step()
        bench.device.cache[1] = 0xEE
        assert bench.manager.lookup(KEYS[:1]) == [tier], "gathered"
        assert bench.take() == []
        bench.device.may_fetch.set()
        assert bench.manager.wait(300)
        (result,) = bench.take()
        assert result.media == (tier,)
        assert bench.holds(9, KEYS[0])


def test_saves_beyond_the_limit_are_dropped_and_counted():
    with opened(host_blocks=8, inflight_blocks=3) as bench:
        bench.device.may_fetch.clear()
        bench.evict(*KEYS[:5])
        assert bench.manager.stats().num_saving == 3
        assert bench.manager.stats().num_saves_dropped == 2
        assert bench.manager.num_available([KEYS[4]]) == 0
        bench.device.may_fetch.set()
        bench.manager.flush(300)
        bench.evict(*KEYS[5:7])
        assert bench.manager.num_available(KEYS[5:7]) == 2
        assert bench.manager.stats().num_saves_dropped == 2


@pytest.mark.parametrize("has_disk", [False, True])
def test_save_while_every_slot_is_read_goes_to_the_disk_or_is_lost(tmp_path, has_disk: bool):
    with opened(host_blocks=1, folder=tmp_path if has_disk else None) as bench:
        bench.evict(KEYS[0])
        bench.manager.flush(300)
        bench.device.may_stage.clear()
        bench.manager.start_load("a", KEYS[:1], [9])
        until(bench.device.is_staging.is_set)
        bench.manager.start_load("b", KEYS[:1], [10])  # queued, with the slot pinned
        bench.evict(KEYS[1])
        bench.manager.flush(300)
        assert bench.manager.lookup([KEYS[1]]) == (["disk"] if has_disk else [])
        assert bench.manager.stats().num_saves_failed == (0 if has_disk else 1)
        bench.device.may_stage.set()
        while bench.manager.wait(300):
            bench.take()
        assert bench.holds(9, KEYS[0])
        assert bench.holds(10, KEYS[0])


def test_load_longer_than_may_be_staged_is_offered_in_parts():
    with opened(host_blocks=8, inflight_blocks=3) as bench:
        for key in KEYS[:5]:
            bench.evict(key)
            bench.manager.flush(300)
        assert bench.manager.num_available(KEYS) == 3
        assert bench.load(*KEYS[:3]).num_blocks_ok == 3
        assert bench.manager.num_available(KEYS[3:]) == 2


def test_load_waits_until_staged_blocks_are_taken():
    with opened(host_blocks=8, inflight_blocks=4) as bench:
        bench.evict(*KEYS[:4])
        bench.manager.start_load("a", KEYS[:3], [10, 11, 12])
        bench.manager.start_load("b", KEYS[1:4], [13, 14, 15])
        assert bench.manager.wait(300)
        time.sleep(0.02)
        assert [result.request_id for result in bench.take()] == ["a"]
        assert bench.manager.wait(300)
        assert [result.request_id for result in bench.take()] == ["b"]
        assert bench.holds(15, KEYS[3])


def test_engine_goes_on_while_a_load_is_staged():
    with opened(host_blocks=8) as bench:
        bench.evict(*KEYS[:2])
        bench.manager.flush(300)
        bench.device.may_stage.clear()
        bench.manager.start_load("r", KEYS[:2], [9, 10])
        until(bench.device.is_staging.is_set)
        # Everything a step calls returns while the load thread stands still.
        for step in range(5):
            assert bench.take() == []
            bench.evict(KEYS[4 + step])
            bench.manager.flush(300)
            assert bench.manager.lookup([KEYS[4 + step]]) == ["host"]
            assert bench.manager.stats().num_loading == 1
        bench.device.may_stage.set()
        assert bench.manager.wait(300)
        assert bench.take()[0].num_blocks_ok == 2
        assert bench.holds(9, KEYS[0])
        assert bench.holds(10, KEYS[1])


def test_blocks_of_a_load_are_not_evicted_under_it():
    with opened(host_blocks=3) as bench:
        bench.evict(*KEYS[:2])
        bench.manager.flush(300)
        bench.device.may_stage.clear()
        bench.manager.start_load("first", KEYS[:1], [9])
        until(bench.device.is_staging.is_set)
        bench.manager.start_load("second", KEYS[1:2], [10])  # queued behind it
        bench.evict(*KEYS[2:6])
        bench.manager.flush(300)
        bench.device.may_stage.set()
        until(lambda: bench.manager.stats().num_loading == 2 and bench.manager.wait(300))
        results = bench.take()
        while len(results) < 2:
            assert bench.manager.wait(300)
            results += bench.take()
        assert [result.num_blocks_ok for result in results] == [1, 1]
        assert bench.holds(10, KEYS[1])


def test_broken_file_ends_the_run_of_good_blocks(tmp_path):
    with opened(folder=tmp_path) as bench:
        bench.evict(*KEYS[:4])
        bench.manager.flush(300)
        Path(disk_tier(tmp_path).path(KEYS[2])).write_bytes(b"rotten")
        result = bench.load(*KEYS[:4])
        assert (result.num_blocks_ok, result.media) == (2, ("disk", "disk"))
        assert bench.manager.num_available(KEYS) == 2
        stats = bench.manager.stats()
        assert stats.num_load_blocks_failed == 2
        assert stats.media["disk"].num_failures == 1
        assert stats.media["disk"].num_hits == 2


def test_block_gone_since_the_lookup_is_a_miss():
    with opened(host_blocks=4) as bench:
        assert bench.load(KEYS[0]) == LoadResult("r", 0)


def test_full_disk_below_a_full_host_loses_only_the_victim(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with opened(host_blocks=2, folder=tmp_path / "file") as bench:
        bench.evict(*KEYS[:3])
        bench.manager.flush(300)
        assert bench.manager.lookup([KEYS[0]]) == []
        assert bench.load(KEYS[1], KEYS[2]).num_blocks_ok == 2


@pytest.mark.parametrize("what", ["fetch", "stage"])
def test_failing_device_is_a_miss(caplog, what: str):
    with opened(host_blocks=4) as bench:
        bench.evict(KEYS[0])
        bench.manager.flush(300)
        bench.device.fails = True
        if what == "fetch":
            bench.evict(KEYS[1])
            bench.manager.flush(300)
            assert bench.manager.num_available([KEYS[1]]) == 0
            assert bench.manager.stats().num_saves_failed == 1
        else:
            assert bench.load(KEYS[0]) == LoadResult("r", 0)
        assert "the device is gone" in caplog.text
        bench.device.fails = False
        bench.evict(KEYS[1])
        assert bench.load(KEYS[0], KEYS[1]).num_blocks_ok == 2, "both threads live on"


def test_blocks_the_device_could_not_gather_are_a_miss():
    with opened(host_blocks=4) as bench:
        bench.manager.on_evict(1, KEYS[0])
        ((_, key),) = bench.manager.take_saves()
        bench.device._submit([key], None)
        assert bench.manager.num_available([KEYS[0]]) == 0
        assert bench.manager.stats().num_saves_failed == 1
        bench.evict(KEYS[0])
        assert bench.load(KEYS[0]).num_blocks_ok == 1


@pytest.mark.parametrize(
    "stage", ["unknown", "waits for a save", "queued", "staging", "finished", "taken"]
)
def test_load_can_be_cancelled_at_every_stage(stage: str):
    with opened(host_blocks=4) as bench:
        bench.evict(*KEYS[:2])
        bench.manager.flush(300)
        bench.device.may_stage.clear()
        if stage == "waits for a save":
            bench.device.may_fetch.clear()
            bench.evict(KEYS[2])
            bench.manager.start_load("r", [KEYS[2]], [9])
            time.sleep(0.01)
        elif stage == "queued":
            bench.manager.start_load("other", KEYS[:1], [8])
            bench.manager.start_load("r", KEYS[1:2], [9])
        elif stage != "unknown":
            bench.manager.start_load("r", KEYS[1:2], [9])
            until(bench.device.is_staging.is_set)
        if stage in ("finished", "taken"):
            bench.device.may_stage.set()
            assert bench.manager.wait(300)
        if stage == "taken":
            bench.take()
        before = bench.device.cache.copy()
        bench.manager.cancel("r")
        bench.manager.cancel("r")
        bench.device.may_stage.set()
        bench.device.may_fetch.set()
        while bench.manager.wait(300):
            assert [result.request_id for result in bench.take()] == ["other"]
        assert np.array_equal(bench.device.cache[9], before[9])
        bench.manager.flush(300)
        # Nothing is pinned and no room is taken: the id and every slot can be used again.
        assert bench.load(KEYS[1]).num_blocks_ok == 1
        bench.evict(*KEYS[4:8])
        bench.manager.flush(300)
        assert bench.manager.num_available(KEYS[4:8]) == 4
        cancelled = 0 if stage in ("unknown", "taken") else 1
        assert bench.manager.stats().num_loads_cancelled == cancelled


def test_request_may_load_again_while_its_cancelled_load_is_still_staged():
    with opened(host_blocks=4) as bench:
        bench.evict(*KEYS[:2])
        bench.device.may_stage.clear()
        bench.manager.start_load("r", KEYS[:1], [9])
        until(bench.device.is_staging.is_set)
        bench.manager.cancel("r")
        bench.manager.start_load("r", KEYS[1:2], [10])
        bench.device.may_stage.set()
        assert bench.manager.wait(300)
        assert len(bench.take()) == 1
        assert not bench.holds(9, KEYS[0])
        assert bench.holds(10, KEYS[1])


def test_cancelled_load_does_not_hold_up_the_one_behind_it():
    with opened(host_blocks=4) as bench:
        bench.evict(KEYS[0])
        bench.manager.flush(300)
        bench.device.may_fetch.clear()
        bench.evict(KEYS[1])
        bench.manager.start_load("waits for a save", KEYS[1:2], [9])
        bench.manager.start_load("behind", KEYS[:1], [10])
        bench.manager.cancel("waits for a save")
        assert bench.manager.wait(300)
        assert [result.request_id for result in bench.take()] == ["behind"]


def test_blocks_on_their_way_from_the_disk_to_memory_count_as_saves(tmp_path):
    with opened(folder=tmp_path) as bench:
        bench.evict(*KEYS[:4])
        bench.manager.flush(300)
    with opened(host_blocks=8, folder=tmp_path, inflight_blocks=4) as bench:
        bench.device.may_fetch.clear()
        bench.evict(KEYS[5])
        assert bench.load(*KEYS[:2]).media == ("disk", "disk")
        assert bench.manager.stats().num_saving == 3
        assert bench.load(*KEYS[:4]).num_blocks_ok == 4
        assert bench.manager.stats().num_saving == 4, "no block twice, and no more than may be"
        bench.device.may_fetch.set()
        bench.manager.flush(300)
        assert bench.manager.lookup(KEYS[:4]) == ["host"] * 3 + ["disk"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_cleared_tiers_have_nothing_and_work_on(tmp_path, tier: str):
    options = {"host_blocks": 8} if tier == "host" else {"folder": tmp_path}
    with opened(**options) as bench:
        bench.evict(*KEYS[:2])
        bench.manager.flush(300)
        bench.manager.on_evict(1, KEYS[2])
        bench.manager.clear()
        assert bench.manager.take_saves() == []
        assert [bench.manager.num_available([key]) for key in KEYS[:3]] == [0, 0, 0]
        bench.evict(KEYS[0])
        assert bench.load(KEYS[0]).num_blocks_ok == 1
        bench.manager.flush(300)
        assert bench.manager.stats().media[tier].num_blocks == 1


def test_saves_on_their_way_do_not_come_back_after_a_clear():
    with opened(host_blocks=8) as bench:
        bench.device.may_fetch.clear()
        bench.evict(*KEYS[:2])
        threading.Timer(0.02, bench.device.may_fetch.set).start()
        bench.manager.clear()
        bench.manager.flush(300)
        assert bench.manager.num_available(KEYS[:1]) == 0
        assert bench.manager.stats().num_saving == 0
        assert bench.manager.stats().media["host"].num_stores == 0, "not even tried"


@pytest.mark.parametrize("stage", ["queued", "staging", "finished"])
def test_loads_on_their_way_end_without_a_block_when_cleared(tmp_path, stage: str):
    with opened(host_blocks=8, folder=tmp_path) as bench:
        bench.evict(*KEYS[:2])
        bench.manager.flush(300)
        bench.device.may_stage.clear()
        bench.manager.start_load("a", KEYS[:1], [9])
        until(bench.device.is_staging.is_set)
        if stage == "queued":
            bench.manager.start_load("b", KEYS[1:2], [10])
        if stage == "finished":
            bench.device.may_stage.set()
            assert bench.manager.wait(300)
        bench.manager.clear()
        bench.device.may_stage.set()
        results = []
        while len(results) < (2 if stage == "queued" else 1):
            assert bench.manager.wait(300)
            results += bench.take()
        assert {result.num_blocks_ok for result in results} == {0}
        bench.manager.flush(300)
        assert bench.manager.num_available(KEYS[:1]) == 0


def test_block_read_from_the_disk_does_not_move_up_after_a_clear(tmp_path):
    with opened(folder=tmp_path) as bench:
        bench.evict(KEYS[0])
        bench.manager.flush(300)
    with opened(host_blocks=4, folder=tmp_path) as bench:
        bench.device.may_stage.clear()
        bench.manager.start_load("a", KEYS[:1], [9])
        until(bench.device.is_staging.is_set)
        bench.manager.clear()
        bench.device.may_stage.set()
        assert bench.manager.wait(300)
        bench.manager.flush(300)
        assert bench.manager.num_available(KEYS[:1]) == 0


def test_new_namespace_hides_the_blocks_of_the_old_weights(tmp_path):
    with opened(folder=tmp_path) as bench:
        bench.evict(KEYS[0])
        bench.manager.flush(300)
        bench.manager.clear("new")
        bench.manager.flush(300)
        assert bench.manager.num_available(KEYS[:1]) == 0
        bench.evict(KEYS[1])
        bench.manager.flush(300)
    left = disk_tier(tmp_path, "new")
    left.scan()
    assert left.keys() == [KEYS[1]]
    assert not (tmp_path / "n").exists()


def test_wait_returns_at_once_without_loads_and_after_its_time():
    with opened(host_blocks=4) as bench:
        assert not bench.manager.wait()
        bench.evict(KEYS[0])
        bench.device.may_stage.clear()
        bench.manager.start_load("r", KEYS[:1], [9])
        assert not bench.manager.wait(0.01)


def test_wait_before_the_saves_are_taken_is_refused():
    with opened(host_blocks=4) as bench:
        bench.manager.on_evict(1, KEYS[0])
        bench.manager.start_load("r", KEYS[:1], [9])
        with pytest.raises(RuntimeError, match=r"Call take_saves\(\) and gather before wait\(\)"):
            bench.manager.wait(1)


def test_wrong_load_is_refused():
    with opened(host_blocks=4) as bench:
        with pytest.raises(ValueError, match="1 keys for 2 block_ids of request 'r'"):
            bench.manager.start_load("r", KEYS[:1], [1, 2])
        with pytest.raises(ValueError, match="0 keys for 0 block_ids"):
            bench.manager.start_load("r", [], [])
        bench.device.may_stage.clear()
        bench.evict(KEYS[0])
        bench.manager.start_load("r", KEYS[:1], [1])
        with pytest.raises(ValueError, match="request 'r' has a load; cancel it first"):
            bench.manager.start_load("r", KEYS[:1], [1])


def test_manager_without_tiers_or_with_other_blocks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="host and disk are both None"):
        TierManager(FakeDevice())
    with pytest.raises(ValueError, match="a tier holds blocks of 64 bytes and the device of 32"):
        TierManager(FakeDevice(), host=HostTier(64, 64))
    with pytest.raises(ValueError, match="host holds blocks of 64 bytes and disk of 32"):
        TierManager(FakeDevice(), host=HostTier(64, 64), disk=disk_tier(tmp_path))


@pytest.mark.parametrize("busy", [False, True])
def test_no_thread_is_left_after_close(tmp_path, busy: bool):
    before = set(threading.enumerate())
    with opened(host_blocks=4, folder=tmp_path) as bench:
        assert len(set(threading.enumerate()) - before) == 2
        bench.evict(*KEYS[:8])
        if busy:
            bench.device.may_fetch.clear()
            bench.evict(*KEYS[8:10])
            bench.manager.start_load("waits", KEYS[8:10], [9, 10])
            bench.manager.start_load("queued", KEYS[:2], [11, 12])
            threading.Timer(0.02, bench.device.may_fetch.set).start()
    assert set(threading.enumerate()) - before <= {
        thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)
    }


def test_closed_manager_finds_and_saves_nothing():
    with opened(host_blocks=4) as bench:
        bench.evict(KEYS[0])
        bench.manager.flush(300)
        bench.manager.close()
        bench.manager.close()
        assert bench.manager.lookup(KEYS[:1]) == []
        bench.manager.on_evict(1, KEYS[1])
        assert bench.manager.take_saves() == []
        assert bench.manager.take_finished() == []
        assert not bench.manager.wait()
        with pytest.raises(RuntimeError, match=r"start no load after close\(\)"):
            bench.manager.start_load("r", KEYS[:1], [9])


def test_idle_threads_keep_no_device_memory_alive():
    with opened(host_blocks=4) as bench:
        seen = []
        fetch, stage = bench.device.fetch, bench.device.stage

        def watched_fetch(gathered):
            seen.append(weakref.ref(gathered))
            return fetch(gathered)

        def watched_stage(blocks, block_ids):
            ids, rows = stage(blocks, block_ids)
            seen.append(weakref.ref(rows))
            return ids, rows

        bench.manager._saves._fetch = watched_fetch
        bench.device.stage = watched_stage
        bench.evict(KEYS[0])
        bench.load(KEYS[0])
        bench.manager.flush(300)
        gc.collect()
        until(lambda: all(ref() is None for ref in seen))
        assert len(seen) == 2
