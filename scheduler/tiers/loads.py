"""`LoadQueue`: blocks on their way from a tier to the device, for requests that wait for them."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paged.scheduler.tiers.device import DeviceSide
from paged.scheduler.tiers.figures import Transfers
from paged.scheduler.tiers.saves import SaveQueue
from paged.scheduler.tiers.stack import Medium, Pin, TierStack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of one load.

    Attributes:
      request_id: of `start`.
      num_blocks_ok: leading blocks whose bytes have arrived; the others must be computed.
      media: where each of these came from.
      payload: what the device's `restore` writes into the cache; None if there is nothing.
    """

    request_id: str
    num_blocks_ok: int
    media: tuple[Medium, ...] = ()
    payload: object | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """One load until it is taken or cancelled (mutable)."""

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    pins: list[Pin | None]
    is_over: bool = False  # cancelled, or its tiers were cleared
    holds_room: bool = False
    media: list[Medium] = field(default_factory=list)


class LoadQueue:
    """Collects and stages blocks on a thread of its own (thread-safe).

    Staged blocks take device memory until the engine has taken them: more than `max_blocks` are
    not staged at once, and a load beyond that waits its turn.

    Args:
      stack: where blocks are; only this thread reads them.
      saves: blocks on their way down, which can be asked for too.
      device: stages blocks.
      changed: lock of the tables, notified of every change; shared with `saves`.
      max_blocks: most blocks staged and not taken.
      clock: monotonic seconds.

    Attributes:
      transfers: from the host to the device.
      num_hits: blocks that were brought up, by medium.
      num_failures, num_cancelled: see `TierStats`.
    """

    def __init__(
        self,
        stack: TierStack,
        saves: SaveQueue,
        device: DeviceSide,
        changed: threading.Condition,
        max_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stack = stack
        self._saves = saves
        self._device = device
        self._changed = changed
        self._max_blocks = max_blocks
        self._clock = clock
        self.transfers = Transfers()
        self._loads: dict[str, _Load] = {}  # not taken and not cancelled
        self._queue: deque[_Load] = deque()
        self._finished: dict[str, LoadResult] = {}
        self._num_staged = 0
        self._closing = False
        self.num_cancelled = 0
        self.num_failures = 0
        self.num_hits: Counter[Medium] = Counter()
        self._thread = threading.Thread(target=self._run, name="paged-kv-load", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def stages(self) -> tuple[int, int, int]:
        """Loads that wait to start, are under way, and are done but not taken."""
        queued, finished = len(self._queue), len(self._finished)
        return queued, len(self._loads) - queued - finished, finished

    def start(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin to bring the blocks of `keys` up, for these blocks of the cache.

        Raises:
          ValueError: there are no keys, or not as many as blocks, or the request has a load.
          RuntimeError: after `close`.
        """
        if not keys or len(keys) != len(block_ids):
            raise ValueError(
                f"{len(keys)} keys for {len(block_ids)} block_ids of request {request_id!r}; give "
                "one block for each key, and at least one."
            )
        with self._changed:
            if self._closing:
                raise RuntimeError("The KV tiers are closed; start no load after close().")
            if request_id in self._loads:
                raise ValueError(f"request {request_id!r} has a load; cancel it first.")
            self._stack.touch(keys)
            pins = [self._stack.pin(key) for key in keys]
            load = _Load(request_id, tuple(keys), tuple(block_ids), pins)
            self._loads[request_id] = load
            self._queue.append(load)
            self._changed.notify_all()

    def take_finished(self) -> list[LoadResult]:
        """Return the loads that have come to an end since the last call, in that order."""
        with self._changed:
            results = list(self._finished.values())
            for result in results:
                self._free_room(self._loads.pop(result.request_id))
                self.num_hits.update(result.media)
            self._finished.clear()
            if results:
                self._changed.notify_all()
            return results

    def cancel(self, request_id: str) -> None:
        """Forget a load, whatever its state; does nothing if the request has none.

        Its blocks of the cache may be reused at once: nothing is written but what was taken.
        """
        with self._changed:
            load = self._loads.pop(request_id, None)
            if load is None:
                return
            load.is_over = True
            self.num_cancelled += 1
            if load in self._queue:
                self._queue.remove(load)
                self._unpin(load)
            if self._finished.pop(request_id, None) is not None:
                self._free_room(load)
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until some load has finished or none is left; return whether one has finished.

        Raises: RuntimeError if saves are recorded and not taken: a load may wait for them.
        """
        with self._changed:
            if self._saves.has_recorded:
                raise RuntimeError("Call take_saves() and gather before wait(): a load needs them.")
            self._changed.wait_for(lambda: self._finished or not self._loads, timeout)
            return bool(self._finished)

    def clear(self) -> None:
        """Let every load end without a block: what it was to bring is to be forgotten."""
        with self._changed:
            for load in self._loads.values():
                load.is_over = True
            for load in self._queue:
                self._unpin(load)
                self._finished[load.request_id] = LoadResult(load.request_id, 0)
            self._queue.clear()
            for request_id in self._finished:
                self._free_room(self._loads[request_id])
                self._finished[request_id] = LoadResult(request_id, 0)
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """End the thread; loads that are not taken are lost."""
        with self._changed:
            self._closing = True
            for load in self._loads.values():
                load.is_over = True
            for load in self._queue:
                self._unpin(load)
            self._queue.clear()
            self._loads.clear()
            self._finished.clear()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a load and do it; a function, so that no reference outlives the load."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return False
            load = self._queue.popleft()
        payload = None
        try:
            payload = self._bring_up(load)
        except Exception:
            # The engine must outlive whatever a device or a disk comes up with.
            logger.exception("Loading KV blocks for %s failed.", load.request_id)
            load.media.clear()
        with self._changed:
            self._unpin(load)
            self._finish(load, payload)
        return True

    def _finish(self, load: _Load, payload: object | None) -> None:
        if self._loads.get(load.request_id) is not load:  # cancelled
            self._free_room(load)
            return
        if load.is_over:  # cleared
            payload = None
            load.media.clear()
        if payload is None:
            self._free_room(load)
        self.num_failures += len(load.keys) - len(load.media)
        self._finished[load.request_id] = LoadResult(
            load.request_id, len(load.media), tuple(load.media), payload
        )
        self._changed.notify_all()

    def _bring_up(self, load: _Load) -> object | None:
        """Collect the leading blocks that can be had, and stage them."""
        with self._changed:
            self._changed.wait_for(lambda: load.is_over or self._has_room(len(load.keys)))
            if load.is_over:
                return None
            load.holds_room = True
            self._num_staged += len(load.keys)
        started = self._clock()
        blocks = self._device.allocate(len(load.keys))
        for index, key in enumerate(load.keys):
            pin = load.pins[index] or self._pin_when_stored(load, key)
            load.pins[index] = pin
            if pin is None or load.is_over or not self._stack.read(pin, blocks, index):
                break
            # At once: saves that this load waits for may need the slot.
            self._stack.unpin(pin)
            load.pins[index] = None
            load.media.append(pin.medium)
        if load.is_over or not load.media:
            return None
        payload = self._device.stage(blocks, load.block_ids[: len(load.media)])
        with self._changed:
            seconds = self._clock() - started
            self.transfers.add(len(load.media), self._stack.block_bytes, seconds)
        if self._stack.host is not None:
            came_from_disk = [
                (key, index)
                for index, (key, medium) in enumerate(zip(load.keys, load.media, strict=False))
                if medium == "disk"
            ]
            with self._changed:
                if not load.is_over:  # after a `clear` these blocks must not come back
                    self._saves.promote(came_from_disk, blocks)
        return payload

    def _pin_when_stored(self, load: _Load, key: bytes) -> Pin | None:
        """Wait for a block on its way down; None if it is nowhere after that."""
        with self._changed:
            self._changed.wait_for(lambda: load.is_over or key not in self._saves)
        return self._stack.pin(key)

    def _has_room(self, num_blocks: int) -> bool:
        return not self._num_staged or self._num_staged + num_blocks <= self._max_blocks

    def _free_room(self, load: _Load) -> None:
        if load.holds_room:
            load.holds_room = False
            self._num_staged -= len(load.keys)
            self._changed.notify_all()

    def _unpin(self, load: _Load) -> None:
        for pin in load.pins:
            if pin is not None:
                self._stack.unpin(pin)
        load.pins.clear()
