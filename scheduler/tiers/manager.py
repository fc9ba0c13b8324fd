"""`TierManager`: the one class that the scheduler sees of the tiers below the device."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from paged.scheduler.tiers.device import DeviceSide
from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.figures import Delays, MediumStats, TierStats
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.loads import LoadQueue, LoadResult
from paged.scheduler.tiers.saves import SaveQueue
from paged.scheduler.tiers.stack import Medium, TierStack

MAX_INFLIGHT_BYTES = 256 * 2**20
"""Most bytes on their way in one direction, which lie in device memory beside the cache."""

# A disk that hangs (a network folder) must not keep the process from ending.
_CLOSE_SECONDS = 30.0


class TierManager:
    """Saves what the device evicts, and brings it up again (mutable).

    All methods belong to the engine's thread and none waits for a copy or a file, but `wait`,
    `flush`, `clear` and `close`. Bytes move on two threads, one for each direction. A block is a
    hit with the right bytes or a miss: nothing that fails below raises here.

    A step of the engine goes: `take_finished` and the device's `restore`, then `schedule` (which
    calls `on_evict`, `lookup` and `start_load`), then `take_saves` and the device's `save`, then
    the step itself. That order keeps evicted content until it is gathered, and is needed also
    where no request is scheduled.

    Args:
      device: moves blocks; tells this manager what it has gathered.
      host, disk: the tiers, at least one; owned from now on.
      max_inflight_bytes: most bytes on their way in either direction. They lie in device memory,
        beside the cache; what is evicted beyond that is dropped, and `lookup` offers no more.
      clock: monotonic seconds.

    Raises: ValueError if there is no tier, or the sizes of blocks differ.
    """

    def __init__(
        self,
        device: DeviceSide,
        *,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stack = TierStack(host, disk)
        if device.block_bytes != self._stack.block_bytes:
            raise ValueError(
                f"a tier holds blocks of {self._stack.block_bytes} bytes and the device of "
                f"{device.block_bytes}; make them for the same cache."
            )
        self._max_blocks = max(1, max_inflight_bytes // device.block_bytes)
        self._clock = clock
        self._lookups = Delays()
        self._queries: Counter[Medium] = Counter()
        self._found: Counter[Medium] = Counter()
        changed = self._changed = threading.Condition()
        self._saves = SaveQueue(self._stack, device.fetch, changed, self._max_blocks, clock)
        self._loads = LoadQueue(self._stack, self._saves, device, changed, self._max_blocks, clock)
        self._closed = False
        device.connect(self._saves.submit)

    def on_evict(self, block_id: int, key: bytes) -> None:
        """Record that a block of the cache loses this content in the step being scheduled.

        For `BlockPool.on_evict`. Does nothing if a tier has the content, or it is on its way.
        """
        self._saves.record(block_id, key)

    def take_saves(self) -> list[tuple[int, bytes]]:
        """Return (block, key) of what was recorded; the device must gather it before the step."""
        return self._saves.take()

    def lookup(self, keys: Sequence[bytes]) -> list[Medium]:
        """Return where the leading run of these blocks is that can be brought up in one load.

        Longer runs than one load may stage are cut; ask again for what follows when it is there.
        """
        if self._closed:
            return []
        started = self._clock()
        media: list[Medium] = []
        for key in keys[: self._max_blocks]:
            medium = self._stack.medium_of(key)
            if medium is None:
                if key not in self._saves:
                    break
                medium = self._stack.top
            media.append(medium)
        self._count_lookup(media, is_miss=len(media) < min(len(keys), self._max_blocks))
        self._lookups.add(self._clock() - started)
        return media

    def _count_lookup(self, media: Sequence[Medium], *, is_miss: bool) -> None:
        """Count which tiers were asked: each below the first for what those above do not have."""
        found = Counter(media)
        self._found.update(found)
        if self._stack.host is not None:
            self._queries["host"] += len(media) + is_miss
        if self._stack.disk is not None:
            self._queries["disk"] += found["disk"] + is_miss

    def num_available(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks `lookup` finds."""
        return len(self.lookup(keys))

    def start_load(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin to bring blocks up; `take_finished` tells when they have arrived.

        Args:
          request_id: of the request that waits; it has one load at a time.
          keys: a leading run that `lookup` found.
          block_ids: as many blocks of the cache, allocated to the request and left alone until
            the load is taken or cancelled. Register them for prefix hits only after `restore`:
            until then they hold nothing that could be shared, or saved.

        Raises:
          ValueError: there are no keys, or not as many as blocks, or the request has a load.
          RuntimeError: after `close`.
        """
        self._loads.start(request_id, keys, block_ids)

    def take_finished(self) -> list[LoadResult]:
        """Return the loads that have ended since the last call; `restore` their payloads at once.

        Of a load that could not bring everything, the leading `num_blocks_ok` blocks are right
        and the others are to be computed.
        """
        return self._loads.take_finished()

    def cancel(self, request_id: str) -> None:
        """Forget the request's load at any time; its blocks may be freed at once."""
        self._loads.cancel(request_id)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a load has ended, for an engine that has nothing else to do.

        Returns: whether `take_finished` will return something.
        Raises: RuntimeError if saves are recorded and not taken: a load may wait for them.
        """
        return self._loads.wait(timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was gathered is in a tier and the folder is read; return whether so."""
        return self._saves.flush(timeout)

    def clear(self, namespace: str | None = None) -> None:
        """Forget every block in all tiers; loads on their way end with none.

        Args:
          namespace: folder for the blocks of new weights (`make_namespace`); None stays.
        """
        self._loads.clear()
        self._saves.clear(namespace)

    def stats(self) -> TierStats:
        """Return the figures as they are now; any thread may ask."""
        with self._changed:
            return TierStats(
                block_bytes=self._stack.block_bytes,
                media={medium: self._medium_stats(medium) for medium in self._stack.media},
                num_saving=len(self._saves),
                num_loading=len(self._loads),
                num_saves_dropped=self._saves.num_dropped,
                num_saves_failed=self._saves.num_failures,
                num_load_blocks_failed=self._loads.num_failures,
                num_loads_cancelled=self._loads.num_cancelled,
                load_stages=self._loads.stages,
                loads=self._loads.transfers.copy(),
                saves=self._saves.transfers.copy(),
                lookups=self._lookups.copy(),
            )

    def _medium_stats(self, medium: Medium) -> MediumStats:
        tier = self._stack.host if medium == "host" else self._stack.disk
        assert tier is not None
        stats = MediumStats(
            num_blocks=len(tier),
            num_bytes=tier.num_bytes,
            capacity_bytes=tier.capacity_bytes,
            num_hits=self._loads.num_hits[medium],
            num_stores=tier.num_stores,
            num_failures=tier.num_failures,
            num_queries=self._queries[medium],
            num_found=self._found[medium],
        )
        return tier.add_figures(stats)

    def close(self) -> None:
        """End both threads and forget what is on its way; a second call does nothing."""
        self._closed = True
        self._loads.close(_CLOSE_SECONDS)
        self._saves.close(_CLOSE_SECONDS)
