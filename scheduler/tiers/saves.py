"""`SaveQueue`: evicted blocks on their way from the device to a tier."""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from paged.scheduler.tiers.figures import Transfers
from paged.scheduler.tiers.host_blocks import HostBlocks
from paged.scheduler.tiers.stack import TierStack

logger = logging.getLogger(__name__)


class SaveQueue:
    """Records what is evicted, and stores it on a thread of its own (thread-safe).

    At most `max_blocks` are on their way at once, since gathered blocks take device memory and a
    disk may be slower than evictions: what exceeds that is dropped. A lost save is a later miss.

    Args:
      stack: where blocks go; only this thread stores into it.
      fetch: waits for gathered blocks and brings them to the host.
      changed: lock of the tables, notified of every change; shared with the load queue.
      max_blocks: most blocks on their way.
      clock: monotonic seconds.

    Attributes:
      transfers: from the device to the host.
      num_dropped, num_failures: blocks that were not saved, see `TierStats`.
    """

    def __init__(
        self,
        stack: TierStack,
        fetch: Callable[[object], HostBlocks],
        changed: threading.Condition,
        max_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stack = stack
        self._fetch = fetch
        self._changed = changed
        self._max_blocks = max_blocks
        self._clock = clock
        self.transfers = Transfers()
        self._recorded: dict[bytes, int] = {}  # evicted in this step: key -> block
        self._pending: set[bytes] = set()  # recorded, being gathered or being stored
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_working = False
        self._generation = 0  # jobs from before a `clear` must not store any more
        self._closing = False
        self.num_dropped = 0
        self.num_failures = 0
        self._add_scan()
        self._thread = threading.Thread(target=self._run, name="paged-kv-save", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is on its way."""
        return key in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_recorded(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._recorded)

    def record(self, block_id: int, key: bytes) -> None:
        """Note that a block has been evicted, unless its content is below or on its way."""
        with self._changed:
            if self._closing or key in self._pending:
                return
            if self._stack.medium_of(key) is not None:
                self._stack.touch([key])
            elif len(self._pending) >= self._max_blocks:
                self.num_dropped += 1
            else:
                self._recorded[key] = block_id
                self._pending.add(key)

    def take(self) -> list[tuple[int, bytes]]:
        """Return (block, key) of what has been recorded, for the device to gather now."""
        with self._changed:
            taken = [(block_id, key) for key, block_id in self._recorded.items()]
            self._recorded.clear()
            return taken

    def submit(self, keys: Sequence[bytes], gathered: object | None) -> None:
        """Store what the device has gathered for these of the taken keys.

        Args:
          keys: in the order of the blocks.
          gathered: the device's handle; None if it could not gather them.
        """
        with self._changed:
            if gathered is None:
                self.num_failures += len(keys)
                self._settle(keys)
            else:
                rows = [(key, row) for row, key in enumerate(keys) if key in self._pending]
                self._add_store(rows, functools.partial(self._take, gathered, len(keys)))

    def promote(self, rows: Sequence[tuple[bytes, int]], blocks: HostBlocks) -> None:
        """Store blocks that came from the disk in host memory too, as far as there is room.

        Args:
          rows: (key, place in `blocks`).
          blocks: not written to any more.
        """
        with self._changed:
            room = max(0, self._max_blocks - len(self._pending))
            chosen = [(key, row) for key, row in rows if key not in self._pending][:room]
            self._pending.update(key for key, _ in chosen)
            self._add_store(chosen, lambda: blocks)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every submitted save has come to an end; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._jobs or self._is_working), timeout)

    def clear(self, namespace: str | None = None) -> None:
        """Forget the blocks on their way and in the tiers; waits for the one being stored."""
        with self._changed:
            self._generation += 1
            self._recorded.clear()
            self._jobs.clear()
            self._settle(list(self._pending))
            self._changed.wait_for(lambda: not self._is_working)
            self._stack.clear(namespace)
            if self._stack.disk is not None:
                self._jobs.append(self._stack.disk.purge)
            if namespace is not None:
                self._add_scan()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """End the thread after the block being stored; what is on its way is lost."""
        with self._changed:
            self._closing = True
            self._recorded.clear()
            self._jobs.clear()
            self._settle(list(self._pending))
        self._thread.join(timeout)

    def _take(self, gathered: object, num_blocks: int) -> HostBlocks:
        """Wait for what the device has gathered, and count it."""
        started = self._clock()
        blocks = self._fetch(gathered)
        with self._changed:
            seconds = self._clock() - started
            self.transfers.add(num_blocks, self._stack.block_bytes, seconds)
        return blocks

    def _settle(self, keys: Sequence[bytes]) -> None:
        self._pending.difference_update(keys)
        self._changed.notify_all()

    def _add_store(
        self, rows: Sequence[tuple[bytes, int]], fetch: Callable[[], HostBlocks]
    ) -> None:
        if self._closing:
            self._settle([key for key, _ in rows])
        elif rows:
            self._jobs.append(functools.partial(self._store, rows, fetch, self._generation))
            self._changed.notify_all()

    def _add_scan(self) -> None:
        generation = self._generation
        if self._stack.disk is not None:
            scan = self._stack.disk.scan
            self._jobs.append(lambda: scan(lambda: self._is_over(generation)))

    def _is_over(self, generation: int) -> bool:
        return self._closing or generation != self._generation

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a job and do it; a function, so that no reference outlives the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if self._closing:
                return False
            job = self._jobs.popleft()
            self._is_working = True
        try:
            job()
        except Exception:
            # The engine must outlive whatever a device or a disk comes up with.
            logger.exception("A KV tier failed; its blocks are computed again.")
        finally:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
        return True

    def _store(
        self,
        rows: Sequence[tuple[bytes, int]],
        fetch: Callable[[], HostBlocks],
        generation: int,
    ) -> None:
        left = [key for key, _ in rows]
        try:
            blocks = fetch()
            for key, row in rows:
                if self._is_over(generation):
                    return
                is_stored = self._stack.store(key, blocks, row)
                with self._changed:
                    left.remove(key)
                    self.num_failures += not is_stored
                    if not self._is_over(generation):
                        self._settle([key])
        except Exception:
            with self._changed:
                self.num_failures += len(left)
                if not self._is_over(generation):
                    self._settle(left)
            raise
