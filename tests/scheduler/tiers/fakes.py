"""A device of plain bytes: its cache is an array with one row a block."""

import hashlib
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from paged.scheduler.tiers.device import Submit
from paged.scheduler.tiers.host_blocks import HostBlocks
from paged.scheduler.tiers.loads import LoadResult
from paged.scheduler.tiers.manager import TierManager

LEAF_BYTES = (24, 8)
BLOCK_BYTES = sum(LEAF_BYTES)


def name(number: int) -> bytes:
    """A key, as long as a real one."""
    return hashlib.sha256(b"key %d" % number).digest()


def content(key: bytes) -> np.ndarray:
    """The bytes that belong to a key."""
    return np.frombuffer(hashlib.sha256(key).digest(), np.uint8)


class FakeDevice:
    """Implements `DeviceSide`; `may_fetch` and `may_stage` hold its threads up while not set."""

    block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int = 64) -> None:
        self.cache = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
        self.may_fetch, self.may_stage = threading.Event(), threading.Event()
        self.may_fetch.set()
        self.may_stage.set()
        self.is_staging = threading.Event()
        self.fails = False

    def connect(self, submit: Submit) -> None:
        self._submit = submit

    def save(self, saves: Sequence[tuple[int, bytes]]) -> None:
        if saves:
            gathered = self.cache[[block_id for block_id, _ in saves]]
            self._submit([key for _, key in saves], gathered)

    def restore(self, payloads: Iterable[object]) -> None:
        for payload in payloads:
            if payload is not None:
                block_ids, rows = payload
                self.cache[block_ids] = rows

    def fetch(self, gathered: object) -> HostBlocks:
        assert self.may_fetch.wait(300)
        if self.fails:
            raise RuntimeError("the device is gone")
        return HostBlocks([gathered[:, : LEAF_BYTES[0]], gathered[:, LEAF_BYTES[0] :]])

    def allocate(self, num_blocks: int) -> HostBlocks:
        return HostBlocks.empty(num_blocks, LEAF_BYTES)

    def stage(self, blocks: HostBlocks, block_ids: Sequence[int]) -> object:
        self.is_staging.set()
        assert self.may_stage.wait(300)
        if self.fails:
            raise RuntimeError("the device is gone")
        return list(block_ids), np.concatenate(blocks.leaves, axis=1)[: len(block_ids)].copy()


class Bench:
    """A manager and its fake device, driven as an engine does."""

    def __init__(self, manager: TierManager, device: FakeDevice) -> None:
        self.manager, self.device = manager, device

    def fill(self, block_id: int, key: bytes) -> None:
        """Compute a block."""
        self.device.cache[block_id] = content(key)

    def evict(self, *keys: bytes) -> None:
        """One step that loses blocks 1, 2, ... with these contents, and overwrites them."""
        for block_id, key in enumerate(keys, start=1):
            self.fill(block_id, key)
            self.manager.on_evict(block_id, key)
        self.end_step()
        self.device.cache[1 : len(keys) + 1] = 0xEE

    def end_step(self) -> None:
        self.device.save(self.manager.take_saves())

    def take(self) -> list[LoadResult]:
        """What has finished, written into the cache."""
        results = self.manager.take_finished()
        self.device.restore(result.payload for result in results)
        return results

    def load(self, *keys: bytes, first_block: int = 32) -> LoadResult:
        """Load these blocks, wait, and check what has arrived."""
        self.manager.start_load("r", keys, range(first_block, first_block + len(keys)))
        assert self.manager.wait(300)
        (result,) = self.take()
        for offset, key in enumerate(keys[: result.num_blocks_ok]):
            assert self.holds(first_block + offset, key)
        return result

    def holds(self, block_id: int, key: bytes) -> bool:
        return self.device.cache[block_id].tobytes() == content(key).tobytes()
