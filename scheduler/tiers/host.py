"""`HostTier`: a fixed arena of host memory, one slot a block."""

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paged.scheduler.tiers.figures import MediumStats
from paged.scheduler.tiers.index import WRITING, Entry, LruIndex

type Block = NDArray[np.uint8]
"""The bytes of one block, `[block_bytes]`."""


class HostTier:
    """Blocks in host memory, least recently used first out (mutable, thread-safe).

    A slot is being written, ready, or pinned by its readers. Bytes move outside the lock: only
    the table of slots is under it, so a look-up never waits for a copy.

    Args:
      capacity_bytes: size of the arena. The system backs a page when it is first written.
      block_bytes: of one block.
      spill: called with key and bytes of a block before its slot is reused: the next tier's store.

    Raises: ValueError if not one block fits, or the memory cannot be reserved.
    """

    medium = "host"

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        spill: Callable[[bytes, Block], object] | None = None,
    ) -> None:
        num_slots = capacity_bytes // block_bytes
        if num_slots < 1:
            raise ValueError(
                f"capacity_bytes={capacity_bytes} of host memory holds no block of {block_bytes} "
                "bytes; raise it (--kv-offloading-size)."
            )
        try:
            self._arena: NDArray[np.uint8] = np.empty((num_slots, block_bytes), np.uint8)
        except MemoryError:
            raise ValueError(
                f"capacity_bytes={capacity_bytes} of host memory cannot be reserved; lower it "
                "(--kv-offloading-size)."
            ) from None
        self.capacity_bytes = num_slots * block_bytes
        self.block_bytes = block_bytes
        self.spill = spill
        self.num_stores = 0
        self.num_failures = 0  # memory does not fail; the same figures as of other tiers
        self._num_reading = 0
        self._num_writing = 0
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are there."""
        return self._index.num_bytes

    def keys(self) -> list[bytes]:
        """Return all keys, next to be evicted first."""
        with self._lock:
            return self._index.keys()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these blocks of one prefix, in its order, the most recently used."""
        with self._lock:
            self._index.touch(keys)

    def pin(self, key: bytes) -> Entry | None:
        """Keep a block in its slot until `unpin`; None if it is not there."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None or entry.ref_count == WRITING:
                return None
            self._hold(entry)
            return entry

    def read(self, entry: Entry) -> Block:
        """Return the bytes of a pinned block; they stay as they are until `unpin`."""
        block: Block = self._arena[entry.slot]
        return block

    def unpin(self, entry: Entry) -> None:
        """Release a pinned block."""
        with self._lock:
            self._release(entry)

    def store(self, key: bytes, fill: Callable[[Block], None]) -> bool:
        """Take a block in, evicting another where no slot is free.

        Args:
          key: name of the content; if it is there, nothing happens.
          fill: writes the block's bytes into the slot it is given.

        Returns: whether the block is there; it is not if every slot is in use.
        """
        if key in self:
            return True
        slot = self._take_slot()
        if slot is None:
            return False
        entry = Entry(key, self.block_bytes, slot, ref_count=WRITING)
        with self._lock:
            if self._index.get(key) is not None:
                self._free.append(slot)
                return True
            self._index.add(entry)
            self._num_writing += 1
        complete = False
        try:
            fill(self._arena[slot])
            complete = True
        finally:
            with self._lock:
                self._num_writing -= 1
                entry.ref_count = 0
                if complete:
                    self.num_stores += 1
                else:
                    self._index.remove(entry)
                self._free_if_lost(entry)
        return True

    def clear(self) -> None:
        """Forget every block; the slots of pinned ones become free when their readers are done."""
        with self._lock:
            entries = self._index.entries()
            self._index.clear()
            self._free += [entry.slot for entry in entries if entry.ref_count == 0]

    def add_figures(self, stats: MediumStats) -> MediumStats:
        """Return `stats` with what only this tier knows."""
        return dataclasses.replace(
            stats, num_reading=self._num_reading, num_writing=self._num_writing
        )

    def _hold(self, entry: Entry) -> None:
        """Add a reference to a complete block."""
        entry.ref_count += 1
        self._num_reading += entry.ref_count == 1

    def _release(self, entry: Entry) -> None:
        """Drop a reference."""
        entry.ref_count -= 1
        if entry.ref_count == 0:
            self._num_reading -= 1
            self._free_if_lost(entry)

    def _free_if_lost(self, entry: Entry) -> None:
        """Free the slot of a block that nobody uses and that is no longer in the index."""
        if self._index.get(entry.key) is not entry:
            self._free.append(entry.slot)

    def _take_slot(self) -> int | None:
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
                victim = self._index.victim()
                if victim is None:
                    return None
                # Found here until it is found below: no look-up may miss a block on its way down.
                self._hold(victim)
            try:
                if self.spill is not None:
                    self.spill(victim.key, self._arena[victim.slot])
            finally:
                with self._lock:
                    if victim.ref_count == 1:  # nobody has begun to read it meanwhile
                        self._index.remove(victim)
                    self._release(victim)
