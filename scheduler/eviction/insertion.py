"""LIP and BIP: least recently used first, but new content has to earn its place by a hit."""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from paged.scheduler.eviction.policy import EvictionPolicy

# Hits of an item that stands among the kept ones: enough for every later release.
_KEPT = 1 << 30


class InsertionOrder[Item: Hashable]:
    """An eviction order in which items without enough hits are inserted where victims are taken.

    Such cold items go first, last in first out; the kept ones follow by age. What was kept once is
    kept until it is dropped.

    Args:
      num_hits: hits that an item needs to be kept: 0 is LRU, 1 is LIP. May be changed at any time.
    """

    __slots__ = ("_cold", "_hits", "_kept", "num_hits")

    def __init__(self, num_hits: int) -> None:
        self.num_hits = num_hits
        # The next victim is the last of _cold and then the first of _kept. Not plain dicts:
        # finding the first entry slows down as they are consumed.
        self._cold: OrderedDict[Item, None] = OrderedDict()
        self._kept: OrderedDict[Item, None] = OrderedDict()
        self._hits: dict[Item, int] = {}

    def __len__(self) -> int:
        return len(self._cold) + len(self._kept)

    def __contains__(self, item: Item) -> bool:
        return item in self._kept or item in self._cold

    def num_cold(self, items: Sequence[Item]) -> int:
        """Return how many of a chain's items, given tail first, stand before one to be kept.

        From the first item with enough hits on all are kept, also one whose own hits went to a
        duplicate: otherwise it could go before a kept one that follows on it.
        """
        hits, enough = self._hits, self.num_hits
        if not enough:
            return 0
        for index, item in enumerate(items):
            if item in hits and hits[item] >= enough:
                return index
        return len(items)

    def release(self, items: Sequence[Item], num_cold: int) -> None:
        """Insert the items of a chain, tail first: the first `num_cold` as cold, then kept ones."""
        if num_cold:
            cold = self._cold
            for item in items[num_cold - 1 :: -1]:
                cold[item] = None
            items = items[num_cold:]
        kept, hits = self._kept, self._hits
        for item in items:
            kept[item] = None
            hits[item] = _KEPT

    def touch(self, items: Sequence[Item]) -> None:
        """Take out those that are here, and count a hit for all."""
        cold, kept, hits = self._cold, self._kept, self._hits
        for item in items:
            if item in kept:
                del kept[item]
            else:
                hits[item] = hits.get(item, 0) + 1
                if item in cold:
                    del cold[item]

    def victims(self, count: int) -> list[Item]:
        """Return the next `count` victims, or all if there are fewer."""
        found = list(itertools.islice(reversed(self._cold), count))
        if len(found) < count:
            found += itertools.islice(self._kept, count - len(found))
        return found

    def drop(self, items: Sequence[Item]) -> None:
        """Forget the items and their hits; they need not be here."""
        cold, kept, hits = self._cold, self._kept, self._hits
        for item in items:
            if item in cold:
                del cold[item]
            elif item in kept:
                del kept[item]
            if item in hits:
                del hits[item]

    def clear(self) -> None:
        """Forget all."""
        self._cold.clear()
        self._kept.clear()
        self._hits.clear()

    def items(self) -> list[Item]:
        """Return the order, the next victim first."""
        return [*reversed(self._cold), *self._kept]


class LIP(EvictionPolicy):
    """LRU in which content without a hit is released to the eviction end.

    A scan or a loop over more than the pool holds then passes through the few blocks at that end
    and leaves the rest alone.

    Args:
      epsilon: share of releases of cold content that are treated as by LRU: every `1 / epsilon`-th,
        by count and not by chance. 0 is LIP; above it is BIP, which forgets an old working set.

    Raises: ValueError if `epsilon` is not in 0 to 1.
    Source: Qureshi et al., Adaptive Insertion Policies for High Performance Caching, ISCA 2007.
    """

    # Closed while requests release all their blocks at once, but a cold tail that is given back
    # ahead of its request would outlive the rest.
    is_closed = False

    def __init__(self, epsilon: float = 0.0) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon={epsilon} must be a share of releases, 0 to 1.")
        self._period = round(1 / epsilon) if epsilon else 0
        self._num_cold_releases = 0
        self._order = InsertionOrder[int](1)

    def release(self, block_ids: Sequence[int]) -> None:
        """Put hit blocks at the recency end; cold ones too if it is their turn."""
        num_cold = self._order.num_cold(block_ids)
        if num_cold and self._period:
            self._num_cold_releases += 1
            if self._num_cold_releases % self._period == 0:
                num_cold = 0
        self._order.release(block_ids, num_cold)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out and count."""
        self._order.touch(block_ids)

    def victims(self, count: int) -> list[int]:
        """Return the cold blocks last in, first out, then kept ones by age."""
        return self._order.victims(count)

    def drop(self, block_ids: Sequence[int]) -> None:
        """Forget the blocks and their hits."""
        self._order.drop(block_ids)

    def clear(self) -> None:
        """Forget all blocks."""
        self._order.clear()

    def released(self) -> list[int]:
        """Return the whole order."""
        return self._order.items()
