"""Look-ahead: evict what the waiting requests want last, and before it what none of them wants."""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from paged.scheduler.eviction.policy import EvictionPolicy

_UNWANTED = -1


class Lookahead(EvictionPolicy):
    """Belady's rule over the next requests of the queue, LRU for content that they do not want.

    With the whole future expected and no window it is the offline optimum for requests that run
    one after the other. Costs a few dictionary operations per block when a request enters the
    window and when it leaves, whatever the pool's size.

    Args:
      window: how many of the first waiting requests count; None counts all.

    Raises: ValueError if `window` is below 1.
    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    # Whoever wants a block wants what is before it: a parent's next use is never the later one.
    is_closed = True

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1; LRU looks at no queue.")
        self._window = window
        self._next_place = 0
        # Both in queue order; the places of the requests in the window, first to last.
        self._in_window: OrderedDict[Hashable, tuple[int, tuple[bytes, ...]]] = OrderedDict()
        self._behind: OrderedDict[Hashable, tuple[bytes, ...]] = OrderedDict()
        self._uses: dict[bytes, deque[int]] = {}
        # Released blocks: by key those that a request would hit; all by the place of their next
        # use, each group with the next victim first.
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._place: dict[int, int] = {}
        self._groups: dict[int, OrderedDict[int, None]] = {}
        # Negated places of the groups, the farthest on top; groups that are gone may still be here.
        self._farthest: list[int] = []

    def expect(self, request_id: Hashable, keys: Sequence[bytes]) -> None:
        """Append to the queue; one that is already in it moves to the end."""
        self.forget(request_id)
        self._behind[request_id] = tuple(keys)
        self._fill_window()

    def forget(self, request_id: Hashable) -> None:
        """Take out of the queue, and let the next one into the window."""
        if self._behind.pop(request_id, None) is not None or request_id not in self._in_window:
            return
        place, keys = self._in_window.pop(request_id)
        for key in reversed(keys):
            uses = self._uses[key]
            uses.remove(place)
            if not uses:
                del self._uses[key]
            self._regroup(key)
        self._fill_window()

    def _fill_window(self) -> None:
        while self._behind and (self._window is None or len(self._in_window) < self._window):
            request_id, keys = self._behind.popitem(False)
            place = self._next_place
            self._next_place += 1
            # Each key once: a request's keys are a chain, but a caller might repeat one.
            keys = tuple(dict.fromkeys(keys))
            self._in_window[request_id] = place, keys
            for key in reversed(keys):
                uses = self._uses.get(key)
                if uses is None:
                    self._uses[key] = deque([place])
                    self._regroup(key)
                else:
                    uses.append(place)

    def _regroup(self, key: bytes) -> None:
        """Move the released block of this key, if any, to where its next use says."""
        block_id = self._by_key.get(key)
        if block_id is not None:
            self._ungroup(block_id)
            self._group(block_id, self._uses[key][0] if key in self._uses else _UNWANTED)

    def _group(self, block_id: int, place: int) -> None:
        self._place[block_id] = place
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = OrderedDict()
            if place != _UNWANTED:
                heapq.heappush(self._farthest, -place)
            if len(self._farthest) > 2 * len(self._groups) + 64:
                self._farthest = [-place for place in self._groups if place != _UNWANTED]
                heapq.heapify(self._farthest)
        group[block_id] = None

    def _ungroup(self, block_id: int) -> None:
        place = self._place.pop(block_id)
        group = self._groups[place]
        del group[block_id]
        if not group:
            del self._groups[place]

    def release(self, block_ids: Sequence[int]) -> None:
        """Append each to the group of its next use."""
        for block_id in block_ids:
            key = self._cache.block_hash(block_id)
            assert key is not None, "released without content"
            self._keys[block_id] = key
            # A duplicate of a released block is worth nothing: a request will hit only one.
            is_wanted = self._by_key.setdefault(key, block_id) == block_id and key in self._uses
            self._group(block_id, self._uses[key][0] if is_wanted else _UNWANTED)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out."""
        for block_id in block_ids:
            key = self._keys.pop(block_id, None)
            if key is not None:
                if self._by_key.get(key) == block_id:
                    del self._by_key[key]
                self._ungroup(block_id)

    def drop(self, block_ids: Sequence[int]) -> None:
        """Take out."""
        self.touch(block_ids)

    def victims(self, count: int) -> list[int]:
        """Return the oldest blocks that nobody wants, then of those wanted last the deepest."""
        found = list(itertools.islice(self._groups.get(_UNWANTED, ()), count))
        gone: list[int] = []
        while len(found) < count:
            place = heapq.heappop(self._farthest)
            # A group that was gone for a while is here twice.
            if -place in self._groups and (not gone or gone[-1] != place):
                gone.append(place)
                found += itertools.islice(self._groups[-place], count - len(found))
        for place in gone:
            heapq.heappush(self._farthest, place)
        return found

    def released(self) -> list[int]:
        """Return the whole order."""
        places = sorted(self._groups, key=lambda place: (place != _UNWANTED, -place))
        return [block_id for place in places for block_id in self._groups[place]]
