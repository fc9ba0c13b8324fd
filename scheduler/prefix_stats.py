"""`PrefixStats`: what the prefix caches were asked for, and had; `HitCounter` counts it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.request import Request
from paged.scheduler.restoring import Restorer


@dataclass(slots=True)
class PrefixStats:
    """Counts since the last report, in tokens (mutable).

    Attributes:
      queries: tokens of requests that were scheduled for the first time.
      hits: of those, found in blocks on the device.
      evicted: of those, what would have been found if it had not been evicted.
      external_queries: tokens that the device did not have, where there are lower tiers.
      external_hits: of those, restored, by medium ("host", "disk").
    """

    queries: int = 0
    hits: int = 0
    evicted: int = 0
    external_queries: int = 0
    external_hits: dict[str, int] = field(default_factory=dict)

    def count(self, request: Request, restored: Mapping[str, int] | None) -> None:
        """Add a request that is scheduled for the first time.

        Args:
          request: its `num_cached_tokens` is set.
          restored: tokens by medium that came from lower tiers; None if there are none.
        """
        self.queries += request.num_tokens
        self.hits += request.num_cached_tokens
        if restored is None:
            return
        num_restored = sum(restored.values())
        self.hits -= num_restored
        self.external_queries += request.num_tokens - (request.num_cached_tokens - num_restored)
        for medium, num_tokens in restored.items():
            self.external_hits[medium] = self.external_hits.get(medium, 0) + num_tokens


class HitCounter:
    """Counts requests when they are first scheduled (mutable).

    Args:
      pool: knows what was evicted; nothing counts if it does not cache.
      restorer: knows what came from lower tiers.
    """

    def __init__(self, pool: BlockPool, restorer: Restorer) -> None:
        self._pool = pool
        self._restorer = restorer
        self._stats = PrefixStats()

    def count(self, request: Request) -> None:
        """Note what a request found, in it and here; call once, as it later hits its own work."""
        request.num_cached_tokens = request.num_computed_tokens
        if not self._pool.enable_caching:
            return
        restored = self._restorer.take_media(request)
        request.restored_tokens = restored or {}
        self._stats.count(request, restored)
        block_size = self._pool.block_size
        missed = request.block_hashes[request.num_cached_tokens // block_size :]
        self._stats.evicted += self._pool.evicted.count_leading(missed) * block_size

    def take(self) -> PrefixStats:
        """Return the counts since the last call."""
        taken, self._stats = self._stats, PrefixStats()
        return taken
