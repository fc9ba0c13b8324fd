"""`BlockPool`: who holds which KV block and which free block goes next; knows ids, not tensors."""

import logging
from collections.abc import Iterable, Iterator, Sequence

from paged.scheduler.prefix_cache import HashIndex

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""Block that belongs to no request: padding rows write into it and nobody reads it."""


class FreeQueue:
    """Free blocks in the order in which they are reused: the eviction order (mutable).

    A doubly linked list rather than a deque, because a prefix hit takes blocks out of the middle.
    The links are two lists of ints and not objects: one microsecond per block matters when a long
    prompt takes two thousand of them. The null block is never free, so its links serve as the fake
    head and tail of the ring. Another eviction policy is another class with these methods.
    """

    __slots__ = ("_next", "_prev", "_size")

    def __init__(self, num_blocks: int) -> None:
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._size = num_blocks - 1

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    def take(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks; the caller knows there are that many."""
        taken = []
        following = self._next
        block_id = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block_id)
            block_id = following[block_id]
        self._link(NULL_BLOCK, block_id)
        self._size -= count
        return taken

    def remove(self, block_id: int) -> None:
        """Take one block out, wherever it stands."""
        self._link(self._prev[block_id], self._next[block_id])
        self._size -= 1

    def put_unhashed(self, block_ids: Sequence[int]) -> None:
        """Add blocks without reusable content: in front, so that they go before any cached one."""
        self._insert_after(NULL_BLOCK, block_ids)

    def put_hashed(self, block_ids: Sequence[int]) -> None:
        """Add cached blocks at the end: least recently used goes first."""
        self._insert_after(self._prev[NULL_BLOCK], block_ids)

    def _insert_after(self, place: int, block_ids: Sequence[int]) -> None:
        following = self._next[place]
        for block_id in block_ids:
            self._link(place, block_id)
            place = block_id
        self._link(place, following)
        self._size += len(block_ids)

    def _link(self, left: int, right: int) -> None:
        self._next[left] = right
        self._prev[right] = left


class BlockPool:
    """Reference counts, contents and reuse order of all KV blocks of one cache (mutable).

    A block is free while nobody refers to it. A free block keeps its hash, and can be hit, until
    it is handed out again: cached blocks are candidates for eviction, not lost capacity.

    Args:
      num_blocks: blocks of the cache, the null block 0 included.
      block_size: tokens per block.
      enable_caching: keep the content of freed blocks findable.
      free_queue: order of reuse, built for the same `num_blocks`; None takes `FreeQueue`.

    Raises: ValueError if `num_blocks` or `block_size` is less than 1.
    Source: vLLM `v1/core/block_pool.py`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        *,
        free_queue: FreeQueue | None = None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._free = FreeQueue(num_blocks) if free_queue is None else free_queue
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index = HashIndex()

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of usable blocks that are referenced, 0 to 1."""
        return 1 - self.num_free / self.num_usable if self.num_usable else 0.0

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables hold the block."""
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """Return the hash of the block's content, None if it is not findable."""
        return self._hashes[block_id]

    def free_order(self) -> list[int]:
        """Return the free blocks, next to be handed out first."""
        return list(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block, referenced or free, that holds this content; None on a miss."""
        return self._index.get(block_hash)

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """Return how many of these are free: touching them costs free capacity."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if not ref_counts[block_id])

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks, each with one reference; cached content in them is lost.

        Raises: ValueError if fewer are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"count={count} exceeds the {len(self._free)} free blocks; compare with num_free."
            )
        block_ids = self._free.take(count)
        hashes = self._hashes
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            block_hash = hashes[block_id]
            if block_hash is not None:
                self._index.remove(block_hash, block_id)
                hashes[block_id] = None
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block of a prefix hit.

        Raises: RuntimeError for a block that is neither referenced nor cached.
        """
        ref_counts = self._ref_counts
        for block_id in block_ids:
            self._check_owned_id(block_id)
            if not ref_counts[block_id]:
                if self._hashes[block_id] is None:
                    raise RuntimeError(f"block {block_id} is free and not cached: cannot touch it.")
                self._free.remove(block_id)
            ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block; blocks without any left become free.

        Pass a request's blocks in reverse, so that the tail of a prefix is evicted before its
        head: a block whose parent is gone can never be hit.

        Raises: RuntimeError for a block that is already free, or that no request can hold.
        """
        ref_counts, hashes = self._ref_counts, self._hashes
        hashed: list[int] = []
        unhashed: list[int] = []
        for block_id in block_ids:
            self._check_owned_id(block_id)
            left = ref_counts[block_id] - 1
            if left < 0:
                raise RuntimeError(f"block {block_id} is already free: freed twice.")
            ref_counts[block_id] = left
            if not left:
                (unhashed if hashes[block_id] is None else hashed).append(block_id)
        self._free.put_unhashed(unhashed)
        self._free.put_hashed(hashed)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make the content of a full block findable; does nothing if caching is off.

        Raises: RuntimeError if the block is free or already has a hash.
        """
        if not self.enable_caching:
            return
        self._check_owned_id(block_id)
        if not self._ref_counts[block_id] or self._hashes[block_id] is not None:
            raise RuntimeError(f"block {block_id} is free or has a hash: cannot register it.")
        self._hashes[block_id] = block_hash
        self._index.insert(block_hash, block_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, unless some block is still referenced; say whether it did.

        The order of reuse stays.
        """
        num_used = self.num_usable - self.num_free
        if num_used:
            logger.warning(
                "Failed to reset prefix cache because some blocks (%d) are not freed yet", num_used
            )
            return False
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        logger.info("Successfully reset prefix cache")
        return True

    def _check_owned_id(self, block_id: int) -> None:
        # A negative id would silently count from the end of the lists.
        if not NULL_BLOCK < block_id < self.num_blocks:
            raise RuntimeError(
                f"block {block_id} cannot be held: ids are 1 to {self.num_usable}, 0 is the null "
                "block."
            )
