"""Auto: how many hits content needs before it is kept is learnt from shadow caches."""

import itertools
from collections.abc import Iterable, Sequence

from paged.scheduler.eviction.insertion import InsertionOrder
from paged.scheduler.eviction.policy import CachedBlocks, EvictionPolicy

NUM_HITS = (0, 1, 2)
"""The candidates: LRU, LIP, and what suits loops: not even a first hit promises a second."""

SAMPLING = 8
"""One block in this many goes through the shadows: hits of a prefix are long runs of blocks."""


class ReuseCounts:
    """How often in a row LRU would have hit a key, as far back as LRU remembers (mutable).

    Args:
      capacity: keys that LRU would hold.
    """

    __slots__ = ("_capacity", "_counts")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[bytes, int] = {}

    def update(self, keys: Sequence[bytes], num_hits: int, lru: "ShadowCache") -> None:
        """Count a request of which LRU hit the first keys and missed the others."""
        counts = self._counts
        for key in keys[:num_hits]:
            counts[key] = counts.get(key, 0) + 1
        for key in keys[num_hits:]:
            counts.pop(key, None)
        if len(counts) > 2 * self._capacity:
            self._counts = {key: count for key, count in counts.items() if key in lru}

    def num_below(self, keys: Iterable[bytes | None], limit: int, enough: int) -> int:
        """Return how many of the first `limit` keys, tail first, precede one with `enough`."""
        counts = self._counts
        for index, key in enumerate(itertools.islice(keys, limit)):
            if key in counts and counts[key] >= enough:
                return index
        return limit

    def clear(self) -> None:
        """Forget all keys."""
        self._counts.clear()


class ShadowCache:
    """What a candidate would hit: keys only, of a sample of the blocks (mutable).

    Args:
      capacity: keys it holds.
      num_hits: as in `InsertionOrder`.
    """

    __slots__ = ("_capacity", "_order")

    def __init__(self, capacity: int, num_hits: int) -> None:
        self._capacity = capacity
        self._order = InsertionOrder[bytes](num_hits)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def run(self, keys: Sequence[bytes], reuses: ReuseCounts) -> int:
        """Pass one request through the cache; return how many of its leading keys it hits."""
        order = self._order
        num_hits = 0
        for key in keys:
            if key not in order:
                break
            num_hits += 1
        order.touch(keys[:num_hits])
        excess = len(order) + len(keys) - self._capacity
        order.drop(order.victims(max(excess, 0)))
        _release(order, keys[::-1], reversed(keys), reuses)
        return num_hits

    def clear(self) -> None:
        """Forget all keys."""
        self._order.clear()


def _release[Item](
    order: InsertionOrder[Item],
    items: Sequence[Item],
    keys: Iterable[bytes | None],
    reuses: ReuseCounts,
) -> None:
    """Insert a chain, tail first; what LRU would have hit often enough counts as hit, too."""
    num_cold = order.num_cold(items)
    if num_cold:
        num_cold = reuses.num_below(keys, num_cold, order.num_hits)
    order.release(items, num_cold)


class Auto(EvictionPolicy):
    """LRU, or an order that resists scans and loops, whichever would have hit more.

    Each candidate of `NUM_HITS` runs in a shadow cache of the pool's capacity. The pool follows one
    of them and moves to another when that one's lead in hit blocks, counted from the last move and
    never below minus one capacity, exceeds `hysteresis` capacities. A smaller lead means nothing:
    over a sawtooth two equal policies lead by turns, each by most of a capacity. As hits count
    those in the pool, and those in a row that LRU's shadow has: what is wanted again within a
    capacity need not be lucky enough to survive as new content.

    The first choice falls when the pool is full: LRU if the requests so far hit at least
    `min_hit_share` of their blocks, else the order for loops. Without any reuse within a capacity
    there is no sign that recency is worth anything, and a loop is decided by what its first pass
    leaves behind. It takes `lookup` to learn; without these calls Auto is LRU.

    Args:
      hysteresis: lead, in capacities, that a candidate needs to be followed.
      min_hit_share: share of blocks that must hit before the first eviction to begin with LRU.

    Raises: ValueError if `hysteresis` is not positive or `min_hit_share` not in 0 to 1.
    Source: duels of insertion policies, Qureshi et al., ISCA 2007, with whole shadow caches
    instead of sampled sets.
    """

    # A block with one hit may be cold and yet released after a cold one that follows on it.
    is_closed = False

    def __init__(self, hysteresis: float = 1.0, min_hit_share: float = 0.1) -> None:
        if hysteresis <= 0:
            raise ValueError(f"hysteresis={hysteresis} must be positive: capacities of hit blocks.")
        if not 0 <= min_hit_share <= 1:
            raise ValueError(f"min_hit_share={min_hit_share} must be a share of blocks, 0 to 1.")
        self._hysteresis = hysteresis
        self._min_hit_share = min_hit_share
        self._leads = [0] * len(NUM_HITS)
        self._num_blocks = 0
        self._num_hit_blocks = 0
        # Until the first choice both orders are kept: the one for LRU, then the one for loops.
        self._orders = [InsertionOrder[int](NUM_HITS[0]), InsertionOrder[int](NUM_HITS[-1])]
        self._followed = 0

    @property
    def num_hits(self) -> int:
        """Hits that content needs at present to be kept; 0 until the pool was full once."""
        return NUM_HITS[self._followed]

    def bind(self, cache: CachedBlocks) -> None:
        """Give the shadows the pool's capacity."""
        super().bind(cache)
        self._capacity = cache.num_usable
        num_keys = max(1, self._capacity // SAMPLING)
        self._reuses = ReuseCounts(num_keys)
        self._shadows = [ShadowCache(num_keys, num_hits) for num_hits in NUM_HITS]

    def lookup(self, keys: Sequence[bytes], num_hits: int) -> None:
        """Pass a request through the shadows, and follow whoever leads by enough."""
        self._num_blocks += len(keys)
        self._num_hit_blocks += num_hits
        # Begun in the middle, so that the sample's length is the rounded share of a short prompt.
        sample = keys[SAMPLING // 2 - 1 :: SAMPLING]
        lru = self._shadows[0]
        hits = [lru.run(sample, self._reuses)]
        self._reuses.update(sample, hits[0], lru)
        hits += [shadow.run(sample, self._reuses) for shadow in self._shadows[1:]]
        base = hits[self._followed]
        self._leads = [
            max(lead + SAMPLING * (found - base), -self._capacity)
            for lead, found in zip(self._leads, hits, strict=True)
        ]
        if len(self._orders) == 1 and max(self._leads) > self._hysteresis * self._capacity:
            self._follow(self._leads.index(max(self._leads)))

    def _follow(self, candidate: int) -> None:
        self._followed = candidate
        self._leads = [0] * len(NUM_HITS)
        self._orders[0].num_hits = NUM_HITS[candidate]

    def _choose_first(self) -> None:
        is_reused = self._num_hit_blocks >= self._min_hit_share * self._num_blocks
        del self._orders[1 if is_reused else 0]
        self._follow(0 if is_reused else len(NUM_HITS) - 1)

    def release(self, block_ids: Sequence[int]) -> None:
        """Insert."""
        for order in self._orders:
            _release(order, block_ids, map(self._cache.block_hash, block_ids), self._reuses)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out and count."""
        for order in self._orders:
            order.touch(block_ids)

    def victims(self, count: int) -> list[int]:
        """Return the next blocks of the order that is followed."""
        if len(self._orders) > 1:
            self._choose_first()
        return self._orders[0].victims(count)

    def drop(self, block_ids: Sequence[int]) -> None:
        """Forget the blocks and their hits."""
        for order in self._orders:
            order.drop(block_ids)

    def clear(self) -> None:
        """Forget contents; what was learnt stays."""
        for order in self._orders:
            order.clear()
        for shadow in self._shadows:
            shadow.clear()
        self._reuses.clear()

    def released(self) -> list[int]:
        """Return the whole order."""
        return self._orders[0].items()
