"""`PrefixTree`: which cached content follows on which, and what may go without orphans."""

from collections.abc import Sequence

from paged.scheduler.prefix_cache import HashIndex


class PrefixTree:
    """The chains of cached blocks (mutable). Links are keys, so duplicates share their place.

    Keeping the links downwards costs as much as all else a pool does, and a policy whose order is
    closed by itself does not need them. Without `keeps_children` they are built when they are first
    asked for, in time proportional to the pool, and kept from then on.

    Args:
      hashes: key per block, None without content; the pool's own list, which it changes.
      index: blocks by key, likewise.
      ref_counts: references per block, likewise.
      keeps_children: whether to keep the links downwards from the start.
    """

    def __init__(
        self,
        hashes: list[bytes | None],
        index: HashIndex,
        ref_counts: list[int],
        *,
        keeps_children: bool,
    ) -> None:
        self._hashes = hashes
        self._index = index
        self._ref_counts = ref_counts
        self._parents: list[bytes | None] = [None] * len(hashes)
        # The null block is the parent of first blocks.
        self._depths = [-1] * len(hashes)
        # Blocks by the key of their parent.
        self._children = HashIndex() if keeps_children else None
        # From a victim that others follow on, down to the deepest of them; see `_deepest`.
        self._path: list[tuple[int, bytes]] = []

    @property
    def keeps_children(self) -> bool:
        """Whether links downwards exist, and so have to be removed."""
        return self._children is not None

    def parent_key(self, block_id: int) -> bytes | None:
        """Return the key of the content before this cached block's, None for a first block."""
        return self._parents[block_id]

    def parent(self, block_id: int) -> int | None:
        """Return a block that holds the content before this one's, None for a first block."""
        key = self._parents[block_id]
        return None if key is None else self._index.get(key)

    def depth(self, block_id: int) -> int:
        """Return the position of a cached block in its chain, 0 for the first."""
        return self._depths[block_id]

    def children(self, block_id: int) -> list[int]:
        """Return the cached blocks whose content follows on this block's."""
        key = self._hashes[block_id]
        return [] if key is None else self._child_index().all(key)

    def is_leaf(self, block_id: int) -> bool:
        """Whether no cached content would lose its parent with this block."""
        key = self._hashes[block_id]
        return key is None or key not in self._child_index() or self._index.count(key) > 1

    def add(self, block_id: int, parent: int, parent_key: bytes | None) -> None:
        """Link a block that is about to get content to the one before it."""
        self._parents[block_id] = parent_key
        self._depths[block_id] = self._depths[parent] + 1
        if parent_key is not None and self._children is not None:
            self._children.insert(parent_key, block_id)

    def remove(self, block_id: int) -> None:
        """Unlink a block that is about to lose its content."""
        parent_key = self._parents[block_id]
        if parent_key is not None and self._children is not None:
            self._children.remove(parent_key, block_id)

    def remove_victims(self, victims: Sequence[int]) -> list[int]:
        """Unlink and return the first victims, as many as leave no orphans.

        If content follows on the very first, it is the last block of what follows instead.
        """
        hashes, parents, children = self._hashes, self._parents, self._child_index()
        leaves: list[int] = []
        for block_id in victims:
            key = hashes[block_id]
            assert key is not None, "a policy named a block without content"
            if key in children:
                # With a duplicate it may go, but then no longer the duplicate: look again.
                is_duplicate = self._index.count(key) > 1
                if is_duplicate or not leaves:
                    leaves.append(block_id if is_duplicate else self._deepest(block_id, key))
                    self.remove(leaves[-1])
                break
            leaves.append(block_id)
            parent_key = parents[block_id]
            if parent_key is not None:
                children.remove(parent_key, block_id)
        return leaves

    def clear(self) -> None:
        """Forget all links."""
        if self._children is not None:
            self._children.clear()

    def _deepest(self, block_id: int, key: bytes) -> int:
        """Return the last block of what follows on this one.

        All of it is released: whoever holds a block holds the one before it. The way down is
        remembered, or evicting a chain whose head is named would take quadratic time.
        """
        path, children = self._path, self._child_index()
        if not path or path[0] != (block_id, key):
            path[:] = [(block_id, key)]
        while True:
            block_id, key = path[-1]
            if self._hashes[block_id] != key or self._ref_counts[block_id]:
                path.pop()
                continue
            child = children.get(key)
            if child is None or self._index.count(key) > 1:
                return block_id
            child_key = self._hashes[child]
            assert child_key is not None, "a child without content"
            assert not self._ref_counts[child], "held without the block before it"
            path.append((child, child_key))

    def _child_index(self) -> HashIndex:
        if self._children is None:
            self._children = HashIndex()
            for block_id, key in enumerate(self._parents):
                if key is not None and self._hashes[block_id] is not None:
                    self._children.insert(key, block_id)
        return self._children
