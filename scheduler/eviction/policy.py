"""`EvictionPolicy`: which released block goes next; knows block ids and keys, never requests' work.

A block is *released* when it is cached and nobody refers to it: a candidate for eviction. The pool
tells a policy what is released, hit and dropped, and asks for victims; everything else about blocks
is the pool's.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Protocol


class CachedBlocks(Protocol):
    """What a policy may ask about cached blocks: the read-only side of `BlockPool`."""

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""

    def block_hash(self, block_id: int) -> bytes | None:
        """Key of the block's content."""

    def depth(self, block_id: int) -> int:
        """Position of a cached block in its chain, 0 for the first."""

    def is_leaf(self, block_id: int) -> bool:
        """Whether no cached content would lose its parent with this block."""

    def parent(self, block_id: int) -> int | None:
        """A block that holds the content before this one's; None for a first block."""

    def children(self, block_id: int) -> list[int]:
        """The cached blocks whose content follows on this block's."""


class EvictionPolicy(ABC):
    """Order in which released blocks are evicted (mutable); serves one pool.

    Calls come in this order for each content: `touch` for every hit, released or still referenced;
    `release` when its last reference is gone; `drop` when it is lost. A block that is dropped may
    hold other content later.
    """

    is_closed: ClassVar[bool] = False
    """Victims never precede the blocks that follow on them, given that requests release blocks
    tail first. Then the pool need not know who follows on whom, and is faster."""

    _cache: CachedBlocks

    def bind(self, cache: CachedBlocks) -> None:
        """Serve this cache; called once, by the pool.

        Raises: RuntimeError if the policy serves a pool already.
        """
        if hasattr(self, "_cache"):
            raise RuntimeError(
                f"{type(self).__name__} serves another pool already; make a new one for each pool."
            )
        self._cache = cache

    @abstractmethod
    def release(self, block_ids: Sequence[int]) -> None:
        """These cached blocks lost their last reference: the tail of a prefix first."""

    @abstractmethod
    def touch(self, block_ids: Sequence[int]) -> None:
        """A request hit these blocks, first to last; the released ones among them are no more."""

    @abstractmethod
    def victims(self, count: int) -> list[int]:
        """Return the released blocks that should go next: at least one, at most `count`.

        They stay released until they are dropped. There are `count` of them; a closed policy
        returns that many.
        """

    @abstractmethod
    def drop(self, block_ids: Sequence[int]) -> None:
        """The content of these blocks is lost; they were released or, rarely, still referenced.

        Keys and parents can still be looked up in the cache.
        """

    @abstractmethod
    def released(self) -> list[int]:
        """Return the released blocks, likely victims first; slow, for resets and tests."""

    def clear(self) -> None:
        """All content is lost; no block is referenced."""
        self.drop(self.released())

    def lookup(self, keys: Sequence[bytes], num_hits: int) -> None:  # noqa: B027
        """A request with these full blocks was admitted; the first `num_hits` were hits."""

    def expect(self, request_id: Hashable, keys: Sequence[bytes]) -> None:  # noqa: B027
        """A request with these full blocks joined the end of the waiting queue."""

    def forget(self, request_id: Hashable) -> None:  # noqa: B027
        """A request left the waiting queue: admitted or aborted. Unknown ones are ignored."""
