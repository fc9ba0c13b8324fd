"""`KVManager`: the block table of one request at a time; decides what fits, never who waits."""

import itertools
from collections.abc import Sequence

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.prefix_cache import extend_block_hashes
from paged.scheduler.request import Request


class KVManager:
    """Grows and releases block tables and publishes the blocks that become full (mutable).

    Blocks are published when they are *scheduled*, before the device has filled them, so that an
    equal request later in the same step can already share them. That is right because each layer
    writes the keys and values of the whole batch before any of its attention reads, and because
    every scheduled step is run.

    Source: vLLM `v1/core/kv_cache_manager.py`.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._versions = itertools.count(1)

    def extend_hashes(self, request: Request) -> None:
        """Hash the request's full blocks that have no hash yet; does nothing if caching is off."""
        if self._pool.enable_caching:
            extend_block_hashes(request, self._pool.block_size)

    def find_cached_blocks(self, request: Request) -> list[int]:
        """Return the cached blocks that start the request's tokens, without taking them.

        The last known token is never part of the hit: its logits have to be computed.
        """
        found: list[int] = []
        if not self._pool.enable_caching:
            return found
        limit = (request.num_tokens - 1) // self._pool.block_size
        for block_hash in request.block_hashes[:limit]:
            block_id = self._pool.lookup(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def admit(
        self,
        request: Request,
        num_new_tokens: int,
        cached_blocks: Sequence[int] = (),
        *,
        full_sequence_must_fit: bool = True,
    ) -> bool:
        """Give a request without blocks its cached ones and room for the tokens that follow.

        On success `num_computed_tokens` stands behind the cached tokens.

        Args:
          request: holds no blocks.
          num_new_tokens: tokens to compute now, after the cached ones; at least 1.
          cached_blocks: from `find_cached_blocks`.
          full_sequence_must_fit: demand room for all known tokens, not only for the first chunk,
            lest a long prompt enters, starves and loses its work.

        Returns: whether it fits; if not, nothing has changed.
        """
        pool = self._pool
        num_cached_tokens = len(cached_blocks) * pool.block_size
        end = num_cached_tokens + num_new_tokens
        room = request.num_tokens if full_sequence_must_fit else end
        # A hit on a free block takes it out of the free ones just as a new block does.
        num_taken = pool.num_unreferenced(cached_blocks)
        if pool.num_blocks_for(room) - len(cached_blocks) + num_taken > pool.num_free:
            return False
        # Touched first: otherwise allocation could evict what was hit.
        pool.touch(cached_blocks)
        new_blocks = pool.allocate(pool.num_blocks_for(end) - len(cached_blocks))
        request.block_tables[0] = [*cached_blocks, *new_blocks]
        request.table_version = next(self._versions)
        request.num_published_blocks = len(cached_blocks)
        request.num_computed_tokens = num_cached_tokens
        self._publish(request, end)
        return True

    def extend(self, request: Request, num_new_tokens: int) -> bool:
        """Give a running request room for its next tokens.

        Returns: whether it fits; if not, nothing has changed.
        """
        pool = self._pool
        end = request.num_computed_tokens + num_new_tokens
        num_new_blocks = -(-end // pool.block_size) - len(request.block_ids)
        if num_new_blocks > 0:
            if num_new_blocks > pool.num_free:
                return False
            request.block_ids.extend(pool.allocate(num_new_blocks))
        if end // pool.block_size > request.num_published_blocks:
            self._publish(request, end)
        return True

    def free(self, request: Request) -> None:
        """Release every block of the request; it may hold none."""
        self._pool.free(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def _publish(self, request: Request, end: int) -> None:
        """Register the blocks that are full once the first `end` tokens are computed."""
        num_full = min(end // self._pool.block_size, len(request.block_hashes))
        for index in range(request.num_published_blocks, num_full):
            parent = request.block_ids[index - 1] if index else NULL_BLOCK
            self._pool.register(request.block_ids[index], request.block_hashes[index], parent)
            request.num_published_blocks = index + 1
