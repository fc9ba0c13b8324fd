"""Least and most recently used first."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from paged.scheduler.eviction.policy import EvictionPolicy


class LRU(EvictionPolicy):
    """Evict what was released longest ago; of one request, its tail first.

    Right when what was used lately is used again soon. Its cliff: a loop over slightly more than
    the pool holds never hits, because each block goes just before it is wanted.
    """

    is_closed = True

    def __init__(self) -> None:
        # Next victim first. Not a plain dict: finding its first entry slows down as it is consumed.
        self._order: OrderedDict[int, None] = OrderedDict()

    def release(self, block_ids: Sequence[int]) -> None:
        """Append."""
        order = self._order
        for block_id in block_ids:
            order[block_id] = None

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out."""
        order = self._order
        for block_id in block_ids:
            if block_id in order:
                del order[block_id]

    def victims(self, count: int) -> list[int]:
        """Return the first ones."""
        return list(itertools.islice(self._order, count))

    def drop(self, block_ids: Sequence[int]) -> None:
        """Take out."""
        self.touch(block_ids)

    def released(self) -> list[int]:
        """Return the whole order."""
        return list(self._order)


class MRU(LRU):
    """Evict what was released last; of one request, its tail first.

    The optimum for loops over more than the pool holds, and a bad choice for nearly all else.
    """

    # A prefix shared with an older request is released late, before that request's own blocks.
    is_closed = False

    def release(self, block_ids: Sequence[int]) -> None:
        """Append so that the tail comes last."""
        super().release(block_ids[::-1])

    def victims(self, count: int) -> list[int]:
        """Return the last ones."""
        return list(itertools.islice(reversed(self._order), count))

    def released(self) -> list[int]:
        """Return the whole order."""
        return list(reversed(self._order))
