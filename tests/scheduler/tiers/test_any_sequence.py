"""Whatever is evicted, asked for, loaded and cancelled: the right bytes or a miss.

The model is a dictionary: a key's bytes follow from the key, and what was evicted is below. Tiers
with room for everything must find all of it; small ones may miss, and only that.
"""

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged.scheduler.tiers.block_file import file_bytes
from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.manager import TierManager
from tests.scheduler.tiers.fakes import BLOCK_BYTES, Bench, FakeDevice, name

KEYS = [name(number) for number in range(16)]
REQUESTS = ["a", "b", "c"]
NUM_BLOCKS = 12
UNUSED = 0xCC
CACHED = range(1, 6)  # blocks that steps fill and evict; the rest are for loads


@dataclasses.dataclass
class Load:
    keys: list[bytes]
    block_ids: list[int]


class Machine(RuleBasedStateMachine):
    """An engine that does as it likes, within the order that `TierManager` asks for."""

    host_blocks = 0
    disk_blocks = 0
    inflight_blocks = 4
    forgets = True  # too small to keep everything

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.restart()
        self.below: set[bytes] = set()

    def restart(self) -> None:
        disk = DiskTier(
            Path(self.folder.name),
            namespace="n",
            block_bytes=BLOCK_BYTES,
            capacity_bytes=max(1, self.disk_blocks) * file_bytes(KEYS[0], BLOCK_BYTES),
        )
        device = FakeDevice(NUM_BLOCKS)
        device.cache[:] = UNUSED
        manager = TierManager(
            device,
            host=HostTier(self.host_blocks * BLOCK_BYTES, BLOCK_BYTES)
            if self.host_blocks
            else None,
            disk=disk if self.disk_blocks else None,
            max_inflight_bytes=self.inflight_blocks * BLOCK_BYTES,
        )
        self.bench = Bench(manager, device)
        self.cached: dict[int, bytes] = {}
        self.loads: dict[str, Load] = {}
        self.free = [block for block in range(1, NUM_BLOCKS) if block not in CACHED]

    @rule(block=st.sampled_from(CACHED), key=st.sampled_from(KEYS))
    def compute(self, block: int, key: bytes) -> None:
        """A step that fills a block, whose old content is evicted first."""
        if (old := self.cached.get(block)) is not None:
            self.bench.manager.on_evict(block, old)
            self.below.add(old)
        self.bench.end_step()
        self.bench.fill(block, key)
        self.cached[block] = key

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 5))
    def look_up(self, key: bytes, count: int) -> None:
        keys = KEYS[KEYS.index(key) :][:count]
        found = self.bench.manager.num_available(keys)
        run = next((i for i, k in enumerate(keys) if k not in self.below), len(keys))
        assert found <= run
        assert self.forgets or found == run

    @rule(
        request=st.sampled_from(REQUESTS),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
    )
    def load(self, request: str, keys: list[bytes]) -> None:
        """Start a load, of blocks that are there or not."""
        if request not in self.loads and len(self.free) >= len(keys):
            block_ids = [self.free.pop() for _ in keys]
            self.loads[request] = Load(keys, block_ids)
            self.bench.manager.start_load(request, keys, block_ids)

    @rule()
    def poll(self) -> None:
        self.collect()

    @rule(request=st.sampled_from(REQUESTS))
    def cancel(self, request: str) -> None:
        self.bench.manager.cancel(request)
        if (load := self.loads.pop(request, None)) is not None:
            # Reused at once: nothing may be written to them any more.
            for block in load.block_ids:
                self.bench.device.cache[block] = UNUSED
            self.free += load.block_ids

    @rule()
    def settle(self) -> None:
        self.bench.end_step()
        assert self.bench.manager.flush(300)

    @rule()
    def finish_loads(self) -> None:
        while self.loads:
            self.bench.end_step()
            assert self.bench.manager.wait(300)
            self.collect()

    @precondition(lambda self: self.disk_blocks and not self.host_blocks)
    @rule()
    def start_again(self) -> None:
        self.settle()
        self.bench.manager.close()
        self.restart()
        assert self.bench.manager.flush(300)

    @rule()
    def clear(self) -> None:
        self.bench.manager.clear()
        self.below.clear()
        for load in self.loads.values():
            load.keys = []  # nothing may arrive

    def collect(self) -> None:
        for result in self.bench.take():
            load = self.loads.pop(result.request_id)
            assert len(result.media) == result.num_blocks_ok <= len(load.keys)
            for block, key in zip(load.block_ids, load.keys[: result.num_blocks_ok], strict=False):
                assert key in self.below
                assert self.bench.holds(block, key)
            self.free += load.block_ids
            for block in load.block_ids:
                self.bench.device.cache[block] = UNUSED

    @invariant()
    def cancelled_and_idle_blocks_are_left_alone(self) -> None:
        if hasattr(self, "bench"):
            assert (self.bench.device.cache[self.free] == UNUSED).all()
            for block, key in self.cached.items():
                assert self.bench.holds(block, key)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.manager.close()
            self.folder.cleanup()


SHAPES = {
    "large host": {"host_blocks": 32, "inflight_blocks": 64, "forgets": False},
    "large disk": {"disk_blocks": 32, "inflight_blocks": 64, "forgets": False},
    "small host over large disk": {
        "host_blocks": 2,
        "disk_blocks": 32,
        "inflight_blocks": 64,
        "forgets": False,
    },
    "small host": {"host_blocks": 3},
    "small disk": {"disk_blocks": 4},
    "small host over small disk": {"host_blocks": 2, "disk_blocks": 4, "inflight_blocks": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_sequence_gives_the_right_bytes_or_a_miss(shape: str):
    machine = type("Shaped", (Machine,), SHAPES[shape])
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def jittered(call: Callable, rng: random.Random) -> Callable:
    def slow(*args: object) -> object:
        time.sleep(rng.random() * 5e-4)
        return call(*args)

    return slow


@pytest.mark.parametrize("seed", range(3))
def test_hammer_with_jittering_threads(seed: int):
    shape = {"host_blocks": 4, "disk_blocks": 8, "inflight_blocks": 6}
    machine = type("Hammer", (Machine,), shape)()
    machine.open()
    rng = random.Random(seed)
    device = machine.bench.device
    device.stage = jittered(device.stage, rng)
    machine.bench.manager._saves._fetch = jittered(device.fetch, rng)
    for _ in range(3000):
        action = rng.choices(
            ["compute", "look_up", "load", "poll", "cancel", "finish", "clear"],
            [40, 10, 20, 20, 5, 5, 0.2],
        )[0]
        if action == "compute":
            machine.compute(rng.choice(CACHED), rng.choice(KEYS))
        elif action == "look_up":
            machine.look_up(rng.choice(KEYS), 4)
        elif action == "load":
            machine.load(rng.choice(REQUESTS), rng.sample(KEYS, rng.randint(1, 3)))
        elif action == "poll":
            machine.poll()
        elif action == "cancel":
            machine.cancel(rng.choice(REQUESTS))
        elif action == "finish":
            machine.finish_loads()
        else:
            machine.clear()
        machine.cancelled_and_idle_blocks_are_left_alone()
    stats = machine.bench.manager.stats()
    hits = sum(medium.num_hits for medium in stats.media.values())
    machine.teardown()
    assert hits > 50, "the hammer must hit something"
