"""`CacheEventRelay`: cache events of the engine thread, told to subscribers on an event loop."""

import logging
from collections.abc import Callable, Sequence

from paged.scheduler.cache_events import CacheEvent, CacheEvents

logger = logging.getLogger(__name__)

type Submit = Callable[[Callable[[], None]], None]
"""Has a function run on some thread, after those that it was given before."""


class CacheEventRelay:
    """Collects events while the engine works and hands them over together (mutable).

    Nobody listens to the cache while there are no subscribers, so that it builds no events.

    Args:
      source: emits on the engine thread.
      on_engine: runs functions on the engine thread, between two steps.
      on_loop: runs functions on the event loop.
    """

    def __init__(self, source: CacheEvents, *, on_engine: Submit, on_loop: Submit) -> None:
        self._source = source
        self._on_engine = on_engine
        self._on_loop = on_loop
        self._listeners: list[Callable[[CacheEvent], None]] = []  # the event loop's
        self._collected: list[CacheEvent] = []  # the engine thread's, as is the next one
        self._unsubscribe: Callable[[], None] | None = None

    def subscribe(self, callback: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `callback` with each event from the next step on; the result ends that.

        Both are for the event loop's thread.
        """

        # A closure of its own, so that a callback may be subscribed twice and removed once.
        def deliver(event: CacheEvent) -> None:
            callback(event)

        def unsubscribe() -> None:
            if deliver not in self._listeners:
                return
            self._listeners.remove(deliver)
            if not self._listeners:
                self._on_engine(self._ignore)

        if not self._listeners:
            self._on_engine(self._listen)
        self._listeners.append(deliver)
        return unsubscribe

    def hand_over(self) -> None:
        """Send what was collected to the event loop; call on the engine thread."""
        if self._collected:
            events = tuple(self._collected)
            self._collected.clear()
            self._on_loop(lambda: self._deliver(events))

    def _listen(self) -> None:
        if self._unsubscribe is None:
            self._unsubscribe = self._source.subscribe(self._collected.append)

    def _ignore(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _deliver(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            for listener in tuple(self._listeners):
                try:
                    listener(event)
                except Exception:  # a stranger's mistake: the others still have to hear of it
                    logger.exception("A subscriber of cache events has failed.")
