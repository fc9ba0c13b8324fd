"""`PrefixPins`: prefixes that callers asked to keep, for a while and within bounds."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.request import Request

logger = logging.getLogger(__name__)

PIN_SECONDS = 300.0
"""How long a pin lasts after the last request that asked for it."""

# Pins may not take more than this share of the pool: the rest is everybody's.
_MAX_SHARE = 0.5


@dataclass(slots=True)
class _Pin:
    block_ids: list[int]
    expires: float


class PrefixPins:
    """Holds one more reference to the blocks of pinned prompts (mutable).

    Args:
      pool: the blocks.
      reserve: blocks that must stay unpinned, so that the longest request still fits.
      clock: seconds, monotonic.
      seconds: how long a pin lasts after its last use.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        reserve: int,
        clock: Callable[[], float],
        seconds: float = PIN_SECONDS,
    ) -> None:
        self._pool = pool
        self._most = min(int(pool.num_usable * _MAX_SHARE), pool.num_usable - reserve)
        self._clock = clock
        self._seconds = seconds
        # By the hash of the last pinned block, which names the whole prefix; soonest to end first.
        self._pins: dict[bytes, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, request: Request) -> None:
        """Pin the full blocks of a request's prompt, or prolong the pin that they have.

        Does nothing, with a warning, where pins already hold as much as they may.
        """
        num_blocks = min(
            request.num_prompt_tokens // self._pool.block_size, request.num_published_blocks
        )
        if not num_blocks:
            return
        name = request.block_hashes[num_blocks - 1]
        pin = self._pins.pop(name, None)
        if pin is None:
            tables = request.block_tables
            block_ids = [i for table in tables for i in table[:num_blocks] if i != NULL_BLOCK]
            if self._pool.num_pinned + len(block_ids) > self._most:
                logger.warning(
                    "Not pinning the %d blocks of a prompt: %d of at most %d are pinned already.",
                    len(block_ids),
                    self._pool.num_pinned,
                    max(self._most, 0),
                )
                return
            self._pool.pin(block_ids)
            pin = _Pin(block_ids, 0.0)
        pin.expires = self._clock() + self._seconds
        self._pins[name] = pin

    def release_expired(self) -> None:
        """Let go of the prefixes that nobody has asked for in a while."""
        now = self._clock()
        while self._pins:
            name, pin = next(iter(self._pins.items()))
            if pin.expires > now:
                return
            self._release(name)

    def clear(self) -> None:
        """Let go of all prefixes."""
        while self._pins:
            self._release(next(iter(self._pins)))

    def _release(self, name: bytes) -> None:
        self._pool.unpin(self._pins.pop(name).block_ids)
