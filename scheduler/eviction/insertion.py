"""LIP and BIP: least recently used first, but new content has to earn its place by a hit."""

from collections import OrderedDict
from collections.abc import Sequence

from paged.scheduler.eviction.policy import CachedBlocks, EvictionPolicy


class LIP(EvictionPolicy):
    """LRU in which content without a hit is released to the eviction end.

    A scan or a loop over more than the pool holds then passes through the few blocks at that end
    and leaves the rest alone.

    Args:
      epsilon: share of releases of cold content that are treated as by LRU: every `1 / epsilon`-th,
        by count and not by chance. 0 is LIP; above it is BIP, which forgets an old working set.
      num_hits: hits that content needs before it is kept by recency.

    Raises: ValueError if `epsilon` is not in 0 to 1 or `num_hits` is below 1.
    Source: Qureshi et al., Adaptive Insertion Policies for High Performance Caching, ISCA 2007.
    """

    is_closed = True

    def __init__(self, epsilon: float = 0.0, num_hits: int = 1) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon={epsilon} must be a share of releases, 0 to 1.")
        if num_hits < 1:
            raise ValueError(f"num_hits={num_hits} must be at least 1; LRU keeps content without.")
        self._period = round(1 / epsilon) if epsilon else 0
        self._num_cold_releases = 0
        self._num_hits = num_hits
        self._hits = bytearray()
        # Both with the next victim first; all of _cold goes before any of _kept. A last-in,
        # first-out list is its own reversal, so _cold is stored with the next victim last.
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    def bind(self, cache: CachedBlocks) -> None:
        """Make room for one count per block."""
        self._hits = bytearray(cache.num_usable + 1)

    def release(self, block_ids: Sequence[int]) -> None:
        """Put hit blocks at the recency end, and cold ones where `_keeps_cold` says."""
        # From the first hit block on everything is kept, also a block whose own hits went to a
        # duplicate: otherwise it could go before a kept block that follows on it.
        hits, enough = self._hits, self._num_hits
        num_cold = 0
        for block_id in block_ids:
            if hits[block_id] >= enough:
                break
            num_cold += 1
        if num_cold and self._keeps_cold():
            num_cold = 0
        cold, kept = self._cold, self._kept
        for block_id in block_ids[num_cold - 1 :: -1] if num_cold else ():
            cold[block_id] = None
        for block_id in block_ids[num_cold:]:
            kept[block_id] = None
            hits[block_id] = enough

    def _keeps_cold(self) -> bool:
        """Say whether this release of cold content is treated as by LRU."""
        self._num_cold_releases += 1
        return self._period > 0 and self._num_cold_releases % self._period == 0

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out and count."""
        cold, kept, hits = self._cold, self._kept, self._hits
        for block_id in block_ids:
            if hits[block_id] < self._num_hits:
                hits[block_id] += 1
            if block_id in kept:
                del kept[block_id]
            elif block_id in cold:
                del cold[block_id]

    def victim(self) -> int:
        """Return the last cold block, or the first kept one."""
        return next(reversed(self._cold)) if self._cold else next(iter(self._kept))

    def victims(self, count: int) -> list[int]:
        """Take the cold blocks last in, first out, then kept ones by age."""
        cold, kept, hits = self._cold, self._kept, self._hits
        num_cold = min(count, len(cold))
        found = [cold.popitem()[0] for _ in range(num_cold)]
        found += [kept.popitem(False)[0] for _ in range(count - num_cold)]
        for block_id in found:
            hits[block_id] = 0
        return found

    def drop(self, block_id: int) -> None:
        """Forget the block and its hits."""
        self._hits[block_id] = 0
        self._cold.pop(block_id, None)
        self._kept.pop(block_id, None)

    def released(self) -> list[int]:
        """Return the whole order."""
        return [*reversed(self._cold), *self._kept]
