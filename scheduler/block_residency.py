"""`ResidencySampler`: how long KV blocks stay with their content, by a sample of them."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# Uses of a block that are remembered, as in the reference: three gaps.
_MAX_USES = 4


class BlockResidency(NamedTuple):
    """The stay of one block, from its allocation until it was given to somebody else.

    Attributes:
      lifetime_seconds: of the whole stay.
      idle_seconds: at its end, since a request last got the block.
      reuse_gaps_seconds: between its last prefix hits, at most three.
    """

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


@dataclass(slots=True)
class _Stay:
    started: float
    last_use: float
    hits: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_USES))


class ResidencySampler:
    """Follows some blocks of a pool (mutable; the pool's thread).

    Args:
      share: of the allocations that are followed, above 0 and at most 1.
      clock: monotonic seconds.
      draw: returns numbers in [0, 1).

    Raises: ValueError for a share out of range.
    Source: vLLM `v1/core/kv_cache_metrics.py`.
    """

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} must be above 0 and at most 1.")
        self._share = share
        self._clock = clock
        self._draw = draw
        self._stays: dict[int, _Stay] = {}
        self._ended: list[BlockResidency] = []

    def on_allocate(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks get new content: what they held has ended."""
        block_ids = list(block_ids)
        self.on_evict(block_ids)
        draw, share = self._draw, self._share
        chosen = [block_id for block_id in block_ids if draw() < share]
        if chosen:
            now = self._clock()
            self._stays.update((block_id, _Stay(now, now)) for block_id in chosen)

    def on_hit(self, block_ids: Iterable[int]) -> None:
        """Note that a request has found these blocks in the prefix cache."""
        found = [stay for block_id in block_ids if (stay := self._stays.get(block_id)) is not None]
        if found:
            now = self._clock()
            for stay in found:
                stay.last_use = now
                stay.hits.append(now)

    def on_evict(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks lose their content."""
        stays = self._stays
        ended = [stays.pop(block_id) for block_id in block_ids if block_id in stays]
        if ended:
            now = self._clock()
            self._ended += [_residency(stay, now) for stay in ended]

    def clear(self) -> None:
        """Forget the blocks that are followed: all lose their content at once."""
        self._stays.clear()

    def take(self) -> tuple[BlockResidency, ...]:
        """Return the stays that have ended since the last call."""
        if not self._ended:
            return ()
        ended, self._ended = tuple(self._ended), []
        return ended


def _residency(stay: _Stay, now: float) -> BlockResidency:
    hits = list(stay.hits)
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(hits))
    return BlockResidency(now - stay.started, now - stay.last_use, gaps)
