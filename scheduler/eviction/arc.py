"""ARC: content seen once and content seen again, with shares that are learnt from ghosts."""

from collections import OrderedDict
from collections.abc import Sequence

from paged.scheduler.eviction.policy import EvictionPolicy


class ARC(EvictionPolicy):
    """Adaptive replacement: evict from the list that has more than its learnt share.

    Released blocks stand in `_recent` (T1, no hit yet) or `_frequent` (T2, hit, or computed again
    soon after eviction), keys of evicted ones in a ghost list each (B1, B2). A ghost that is
    computed again says that its list was too short.

    Where a block without a hit is released while its chain has hits, it still counts as recent.
    Ghosts reach only as far as the pool is large: over a loop of more than twice that, ARC is LRU.

    Source: Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003; the
    variant of vLLM `v1/kv_offload/cpu/policies/arc.py`, whose lists are each trimmed to capacity.
    """

    # A frequent block may lie before a recent one that is kept longer.
    is_closed = False

    def __init__(self) -> None:
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._is_hit: set[int] = set()
        self._target = 0.0

    @property
    def target(self) -> float:
        """Blocks that content seen once may take before it is evicted first, 0 to the capacity."""
        return self._target

    def release(self, block_ids: Sequence[int]) -> None:
        """Append each to its list, and learn from the ghosts among them."""
        for block_id in block_ids:
            key = self._cache.block_hash(block_id)
            assert key is not None, "released without content"
            if self._learn(key):
                self._is_hit.add(block_id)
            (self._frequent if block_id in self._is_hit else self._recent)[block_id] = None

    def _learn(self, key: bytes) -> bool:
        """Move the target if the key is a ghost; say whether it was."""
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        if key in recent:
            step = max(1.0, len(frequent) / len(recent))
            self._target = min(self._target + step, self._cache.num_usable)
            del recent[key]
            return True
        if key in frequent:
            self._target = max(self._target - max(1.0, len(recent) / len(frequent)), 0.0)
            del frequent[key]
            return True
        return False

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out; the next release makes them frequent."""
        for block_id in block_ids:
            self._is_hit.add(block_id)
            self._recent.pop(block_id, None)
            self._frequent.pop(block_id, None)

    def victims(self, count: int) -> list[int]:
        """Return the oldest block of the list that is over its share: one, for lengths change."""
        recent, frequent = self._recent, self._frequent
        is_recent = recent and (len(recent) >= int(self._target) or not frequent)
        return [next(iter(recent if is_recent else frequent))]

    def drop(self, block_ids: Sequence[int]) -> None:
        """Take out; content that was released becomes a ghost."""
        for block_id in block_ids:
            self._is_hit.discard(block_id)
            if block_id in self._recent:
                del self._recent[block_id]
                self._remember(block_id, self._recent_ghosts)
            elif block_id in self._frequent:
                del self._frequent[block_id]
                self._remember(block_id, self._frequent_ghosts)

    def _remember(self, block_id: int, ghosts: OrderedDict[bytes, None]) -> None:
        key = self._cache.block_hash(block_id)
        assert key is not None, "dropped without content"
        ghosts[key] = None
        ghosts.move_to_end(key)
        if len(ghosts) > self._cache.num_usable:
            ghosts.popitem(False)

    def clear(self) -> None:
        """Forget contents, ghosts and what was learnt."""
        self._recent.clear()
        self._frequent.clear()
        self._recent_ghosts.clear()
        self._frequent_ghosts.clear()
        self._is_hit.clear()
        self._target = 0.0

    def released(self) -> list[int]:
        """Return the recent list, then the frequent one; victims come from both."""
        return [*self._recent, *self._frequent]
