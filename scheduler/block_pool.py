"""`BlockPool`: who holds which KV block and whose content is lost next; knows ids, not tensors."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from paged.scheduler.block_residency import ResidencySampler
from paged.scheduler.cache_events import AllBlocksCleared, BlockRemoved, CacheEvents
from paged.scheduler.evicted_keys import EvictedKeys
from paged.scheduler.eviction.policy import EvictionPolicy
from paged.scheduler.eviction.recency import LRU
from paged.scheduler.prefix_cache import HashIndex
from paged.scheduler.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""Block that belongs to no request: padding rows write into it and nobody reads it."""


# Of larger pools a part: a key takes some 200 bytes.
_MAX_EVICTED_KEYS = 1 << 18


class BlockPool:
    """Reference counts, contents and reuse order of all KV blocks of one cache (mutable).

    A block is free while nobody refers to it. Free blocks without content are handed out first,
    latest freed first; then the policy chooses which cached content is lost. Until then a free
    block can be hit: cached blocks are candidates for eviction, not lost capacity.

    What is cached is *closed under parent*: with a content, all before it in its chain is cached,
    or it could never be hit. Where two blocks hold the same content either may go.

    Args:
      num_blocks: blocks of the cache, the null block 0 included.
      block_size: tokens per block.
      enable_caching: keep the content of freed blocks findable.
      policy: order of eviction, serving no other pool; None takes `LRU`.

    Attributes:
      policy: the order of eviction; the scheduler tells it what waits and what was admitted.
      on_evict: called with block and key before a content is lost to `allocate`, to save it.
      evicted: the contents that were lost last, as many as there are blocks.
      events: subscribers hear what content is removed or cleared.
      residency: follows some blocks for metrics; None: none.
      split_key: takes a key apart into hash and group, for events; None: group 0.

    Raises: ValueError if `num_blocks` or `block_size` is less than 1.
    Source: vLLM `v1/core/block_pool.py`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        *,
        policy: EvictionPolicy | None = None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.on_evict: Callable[[int, bytes], None] | None = None
        self.events = CacheEvents()
        self.evicted = EvictedKeys(min(num_blocks, _MAX_EVICTED_KEYS))
        self.residency: ResidencySampler | None = None
        self.split_key: Callable[[bytes], tuple[bytes, int]] | None = None
        # Free blocks without content, next one last: taking and adding are slices.
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._num_released = 0
        self._ref_counts = [0] * num_blocks
        self._pins: dict[int, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index = HashIndex()
        self.policy = LRU() if policy is None else policy
        self.policy.bind(self)
        self._tree = PrefixTree(
            self._hashes,
            self._index,
            self._ref_counts,
            keeps_children=not self.policy.is_closed,
        )

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached ones included."""
        return len(self._blank) + self._num_released

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned: lost to `num_free` until they are unpinned."""
        return len(self._pins)

    @property
    def usage(self) -> float:
        """Share of usable blocks that are referenced, 0 to 1."""
        return 1 - self.num_free / self.num_usable if self.num_usable else 0.0

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables and pins hold the block."""
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """Return the key of the block's content, None if it is not findable."""
        return self._hashes[block_id]

    def copy_states(self) -> tuple[list[int], list[bytes | None]]:
        """Return, by block id, how many hold each block, and the key of its content if findable."""
        return self._ref_counts.copy(), self._hashes.copy()

    def depth(self, block_id: int) -> int:
        """Return the position of a cached block in its chain, 0 for the first."""
        return self._tree.depth(block_id)

    def parent(self, block_id: int) -> int | None:
        """Return a block that holds the content before this one's, None for a first block."""
        return self._tree.parent(block_id)

    def children(self, block_id: int) -> list[int]:
        """Return the cached blocks whose content follows on this block's.

        The first call may take time in proportion to the pool.
        """
        return self._tree.children(block_id)

    def is_leaf(self, block_id: int) -> bool:
        """Whether no cached content would lose its parent with this block."""
        return self._tree.is_leaf(block_id)

    def free_order(self) -> list[int]:
        """Return the free blocks, next to be handed out first as far as the policy can tell."""
        return [*reversed(self._blank), *self.policy.released()]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, key: bytes) -> int | None:
        """Return the block, referenced or free, that holds this content; None on a miss."""
        return self._index.get(key)

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """Return how many of these are free: touching them costs free capacity."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if not ref_counts[block_id])

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks, each with one reference; cached content in them is lost.

        Raises: ValueError if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(
                f"count={count} exceeds the {self.num_free} free blocks; compare with num_free."
            )
        rest = len(self._blank) - count
        if rest >= 0:
            block_ids = self._blank[rest:]
            del self._blank[rest:]
            block_ids.reverse()
        else:
            block_ids = self._blank[::-1]
            self._blank.clear()
            block_ids += self._take_victims(-rest)
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] = 1
        if self.residency is not None:
            self.residency.on_allocate(block_ids)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block of a prefix hit, first to last.

        Raises: RuntimeError for a block that is neither referenced nor cached.
        """
        block_ids = list(block_ids)
        ref_counts, num_blocks = self._ref_counts, self.num_blocks
        for block_id in block_ids:
            if not NULL_BLOCK < block_id < num_blocks:
                self._refuse_id(block_id)
            if not ref_counts[block_id]:
                if self._hashes[block_id] is None:
                    raise RuntimeError(f"block {block_id} is free and not cached: cannot touch it.")
                self._num_released -= 1
            ref_counts[block_id] += 1
        self.policy.touch(block_ids)
        if self.residency is not None:
            self.residency.on_hit(block_ids)

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block; blocks without any left become free.

        Pass a request's blocks in reverse, so that the tail of a prefix is evicted before its
        head: a block whose parent is gone can never be hit.

        Raises: RuntimeError for a block that is already free, or that no request can hold.
        """
        ref_counts, hashes, num_blocks = self._ref_counts, self._hashes, self.num_blocks
        released: list[int] = []
        blank: list[int] = []
        for block_id in block_ids:
            if not NULL_BLOCK < block_id < num_blocks:
                self._refuse_id(block_id)
            left = ref_counts[block_id] - 1
            if left < 0:
                raise RuntimeError(f"block {block_id} is already free: freed twice.")
            ref_counts[block_id] = left
            if not left:
                (blank if hashes[block_id] is None else released).append(block_id)
        blank.reverse()
        self._blank += blank
        if released:
            self._num_released += len(released)
            self.policy.release(released)

    def register(self, block_id: int, key: bytes, parent: int = NULL_BLOCK) -> None:
        """Make the content of a full block findable; does nothing if caching is off.

        Args:
          block_id: a referenced block without content.
          key: chained hash, and whatever else keeps apart what must not be mixed.
          parent: the block before it in the same block table, held by the same request; the null
            block for a first one and where order carries no meaning. If its content was dropped,
            nothing is registered: no lookup would come this far.

        Raises: RuntimeError if the block is free or already has a hash, or the parent is free.
        """
        if not self.enable_caching:
            return
        hashes, num_blocks = self._hashes, self.num_blocks
        if not NULL_BLOCK < block_id < num_blocks:
            self._refuse_id(block_id)
        if not self._ref_counts[block_id] or hashes[block_id] is not None:
            raise RuntimeError(f"block {block_id} is free or has a hash: cannot register it.")
        parent_key = None
        if parent != NULL_BLOCK:
            if not NULL_BLOCK < parent < num_blocks:
                self._refuse_id(parent)
            if not self._ref_counts[parent]:
                raise RuntimeError(f"parent={parent} of block {block_id} is free: hold it, too.")
            parent_key = hashes[parent]
            if parent_key is None:
                return
        self._tree.add(block_id, parent, parent_key)
        hashes[block_id] = key
        self._index.insert(key, block_id)

    def unregister(self, block_id: int) -> None:
        """Take back `register`: the content will not come to be. What follows on it goes, too.

        Raises: RuntimeError if the block is free.
        """
        self._check_id(block_id)
        if not self._ref_counts[block_id]:
            raise RuntimeError(f"block {block_id} is free: evict its content instead.")
        self._forget([block_id])

    def evict(self, block_ids: Iterable[int]) -> None:
        """Drop the content of these blocks, held or free, and all that follows on it; free none.

        Raises: RuntimeError for a block that no request can hold.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            self._check_id(block_id)
        self._forget(block_ids)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep a cached prefix: one more reference for each block, first to last.

        Raises: RuntimeError for a block that is not cached or whose parent is not pinned.
        """
        kept = {self._hashes[block_id] for block_id in self._pins} | {None}
        for block_id in block_ids:
            self._check_id(block_id)
            if self._hashes[block_id] is None:
                raise RuntimeError(f"block {block_id} is not cached: cannot pin it.")
            if self._tree.parent_key(block_id) not in kept:
                raise RuntimeError(
                    f"block {block_id} follows on a block that is not pinned: pin a prefix from "
                    "its first block on."
                )
            kept.add(self._hashes[block_id])
        self.touch(block_ids)
        for block_id in block_ids:
            self._pins[block_id] = self._pins.get(block_id, 0) + 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take back one `pin` of each block, given in the same order.

        Raises: RuntimeError for a block that is not pinned, or on which a pinned one follows.
        """
        left = dict(self._pins)
        for block_id in block_ids:
            if not left.get(block_id):
                raise RuntimeError(f"block {block_id} is not pinned: cannot unpin it.")
            left[block_id] -= 1
        left = {block_id: count for block_id, count in left.items() if count}
        kept = {self._hashes[block_id] for block_id in left} | {None}
        for block_id in left:
            is_cached = self._hashes[block_id] is not None
            if is_cached and self._tree.parent_key(block_id) not in kept:
                raise RuntimeError(
                    f"block {block_id} would stay pinned without the block before it: unpin a "
                    "prefix from its last block on."
                )
        self._pins = left
        self.free(reversed(block_ids))

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
        self._blank = self.free_order()[::-1]
        self._num_released = 0
        self.policy.clear()
        if self.residency is not None:
            self.residency.clear()
        self._index.clear()
        self.evicted.clear()
        self._tree.clear()
        self._hashes[:] = [None] * self.num_blocks
        self.events.emit(AllBlocksCleared())
        logger.info("Successfully reset prefix cache")
        return True

    def _take_victims(self, count: int) -> list[int]:
        """Remove the content of `count` released blocks; the caller makes them referenced."""
        block_ids: list[int] = []
        keys: list[bytes] = []
        is_closed = self.policy.is_closed
        while len(block_ids) < count:
            victims = self.policy.victims(count - len(block_ids))
            if is_closed:
                for block_id in victims if self._tree.keeps_children else ():
                    self._tree.remove(block_id)
            else:
                victims = self._tree.remove_victims(victims)
            self.policy.drop(victims)
            keys += self._drop_contents(victims)
            block_ids += victims
        self._num_released -= count
        self.evicted.add(keys)
        if self.on_evict is not None or self.events.is_active:
            # Of two blocks with the same content that go together, the latter one tells.
            pairs = zip(block_ids, keys, strict=True)
            lost = {key: block_id for block_id, key in pairs if key not in self._index}
            if self.on_evict is not None:
                for key, block_id in lost.items():
                    self.on_evict(block_id, key)
            self._emit_removed(list(lost))
        return block_ids

    def _drop_contents(self, block_ids: Iterable[int]) -> list[bytes]:
        """Make contents unfindable; return their keys."""
        hashes, remove = self._hashes, self._index.remove
        keys = []
        for block_id in block_ids:
            key = hashes[block_id]
            assert key is not None, "no content to drop"
            hashes[block_id] = None
            remove(key, block_id)
            keys.append(key)
        return keys

    def _forget(self, block_ids: list[int]) -> None:
        """Drop contents and what follows on them."""
        lost: list[bytes] = []
        while block_ids:
            block_id = block_ids.pop()
            key = self._hashes[block_id]
            if key is None:
                continue
            if not self._ref_counts[block_id]:
                self._num_released -= 1
                self._blank.append(block_id)
            # Even with a duplicate: whoever holds what follows may not hold the duplicate, and the
            # policy may let that go first.
            block_ids += self.children(block_id)
            if self._index.count(key) == 1:
                lost.append(key)
            self.policy.drop([block_id])
            self._tree.remove(block_id)
            self._drop_contents([block_id])
            if self.residency is not None:
                self.residency.on_evict([block_id])
        self._emit_removed(lost)

    def _emit_removed(self, keys: list[bytes]) -> None:
        if not keys or not self.events.is_active:
            return
        groups: dict[int, list[bytes]] = {}
        for key in keys:
            block_hash, group = (key, 0) if self.split_key is None else self.split_key(key)
            groups.setdefault(group, []).append(block_hash)
        for group, block_hashes in groups.items():
            self.events.emit(BlockRemoved(tuple(block_hashes), group))

    def _check_id(self, block_id: int) -> None:
        if not NULL_BLOCK < block_id < self.num_blocks:
            self._refuse_id(block_id)

    def _refuse_id(self, block_id: int) -> NoReturn:
        # A negative id would silently count from the end of the lists. The loops over blocks
        # compare in place: a call per block would cost as much as all else they do.
        raise RuntimeError(
            f"block {block_id} cannot be held: ids are 1 to {self.num_usable}, 0 is the null block."
        )
