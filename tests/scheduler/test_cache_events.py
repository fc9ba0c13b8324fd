"""`CacheEvents`: every subscriber, in order, until it leaves."""

from paged.scheduler.cache_events import AllBlocksCleared, BlockRemoved, CacheEvents


def test_each_subscriber_hears_each_event_until_it_unsubscribes():
    events = CacheEvents()
    assert not events.is_active
    first, second = [], []
    leave_first = events.subscribe(first.append)
    leave_second = events.subscribe(second.append)
    removed = BlockRemoved((b"hash",), group=1)
    events.emit(removed)
    leave_first()
    leave_first()
    assert events.is_active
    events.emit(AllBlocksCleared())
    leave_second()
    assert not events.is_active
    events.emit(removed)
    assert first == [removed]
    assert second == [removed, AllBlocksCleared()]


def test_callback_that_subscribed_twice_leaves_once():
    events = CacheEvents()
    heard = []
    leave = events.subscribe(heard.append)
    events.subscribe(heard.append)
    leave()
    leave()
    events.emit(AllBlocksCleared())
    assert heard == [AllBlocksCleared()]


def test_subscriber_may_leave_while_it_is_called():
    events = CacheEvents()
    heard = []

    def once(event):
        heard.append(event)
        leave()

    leave = events.subscribe(once)
    events.subscribe(heard.append)
    events.emit(AllBlocksCleared())
    events.emit(AllBlocksCleared())
    assert len(heard) == 3
