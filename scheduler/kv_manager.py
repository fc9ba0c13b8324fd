"""`KVManager`: the block tables of one request at a time; decides what fits, never who waits.

A request has one block table per cache group. Layers of a group keep the same blocks: the first
group keeps all of a request's blocks, a sliding-window group only those that a later token can
still see. All groups draw from one pool.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.cache_events import BlockStored
from paged.scheduler.prefix_cache import PrefixHasher, extra_keys
from paged.scheduler.request import CacheMode, Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that start a request's tokens, not yet taken.

    Attributes:
      num_blocks: blocks of the prefix.
      tables: for each group its blocks in token order, `num_blocks` each; the null block stands
        where a sliding window has passed.
    """

    num_blocks: int
    tables: tuple[list[int], ...]

    @property
    def block_ids(self) -> list[int]:
        """Every block of the hit, group after group."""
        return [block_id for table in self.tables for block_id in table if block_id != NULL_BLOCK]


# One count for all managers: schedulers may share a runner, which tells requests apart by it.
_VERSIONS = itertools.count(1)


class KVManager:
    """Grows and releases block tables and publishes the blocks that become full (mutable).

    Blocks are published when they are *scheduled*, before the device has filled them, so that an
    equal request later in the same step can already share them. That is right because each layer
    writes the keys and values of the whole batch before any of its attention reads, and because
    every scheduled step is run. A block whose last token is still being sampled is published when
    that token is known.

    Args:
      pool: the blocks.
      windows: for each cache group its sliding window in tokens, None for full attention; the
        first group is never treated as sliding.
      max_num_batched_tokens: most tokens of one step, which bounds what a sliding group holds.
      hasher: names the blocks' contents; None takes the default algorithm.

    Source: vLLM `v1/core/kv_cache_manager.py`, `v1/core/single_type_kv_cache_manager.py`.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        windows: Sequence[int | None] = (None,),
        max_num_batched_tokens: int = 0,
        hasher: PrefixHasher | None = None,
    ) -> None:
        if not windows or windows[0] is not None:
            raise ValueError(f"windows={windows!r} must start with None, the full-attention group.")
        self.hasher = PrefixHasher() if hasher is None else hasher
        self._pool = pool
        self._windows = tuple(windows)
        self._sliding = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._has_groups = len(windows) > 1
        self._max_num_batched_tokens = max_num_batched_tokens
        self._copies: list[tuple[int, int]] = []
        if self._has_groups:
            pool.split_key = _split_key
        self._may_share_partial = False

    @property
    def is_plain(self) -> bool:
        """Whether a token inside a block needs nothing: no window passes, no block is shared."""
        return not (self._sliding or self._may_share_partial)

    @property
    def num_groups(self) -> int:
        """Block tables of each request."""
        return len(self._windows)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a request of this length holds at once, over all groups."""
        needed = self._pool.num_blocks_for(num_tokens)
        return sum(self._peak_blocks(window, needed) for window in self._windows)

    def _peak_blocks(self, window: int | None, num_blocks: int) -> int:
        """Return the most blocks that a sequence of `num_blocks` blocks holds in one group."""
        if window is None:
            return num_blocks
        # Its window before the step, the step's own tokens, and a start in the midst of a block.
        peak = self._pool.num_blocks_for(window - 1 + self._max_num_batched_tokens) + 1
        return min(num_blocks, peak)

    def extend_hashes(self, request: Request) -> None:
        """Hash the request's full blocks that have no hash yet; does nothing if caching is off."""
        if self._pool.enable_caching:
            self.hasher.extend(request, self._pool.block_size)

    def find_hit(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix of the request, without taking it.

        The last known token is never part of it: its logits have to be computed. Nor is any of a
        prompt whose hidden states are wanted.
        """
        first: list[int] = []
        if self._pool.enable_caching and not request.needs_whole_prompt:
            lookup = self._pool.lookup
            limit = (request.num_tokens - 1) // self._pool.block_size
            for block_hash in request.block_hashes[:limit]:
                block_id = lookup(block_hash)
                if block_id is None:
                    break
                first.append(block_id)
        if not self._has_groups:
            return PrefixHit(len(first), (first,))
        return self._find_hybrid_hit(request.block_hashes, first)

    def _find_hybrid_hit(self, hashes: Sequence[bytes], first: list[int]) -> PrefixHit:
        """Shorten the first group's hit until every group has what the next token looks back to."""
        length = len(first)
        tables: dict[int, list[int]] = {}
        is_settled = False
        while not is_settled:
            is_settled = True
            for group in range(1, len(self._windows)):
                tables[group] = self._group_hit(hashes[:length], group)
                if len(tables[group]) < length:
                    length, is_settled = len(tables[group]), False
        return PrefixHit(length, (first[:length], *(tables[g][:length] for g in sorted(tables))))

    def _group_hit(self, hashes: Sequence[bytes], group: int) -> list[int]:
        """Return the table of the longest prefix whose end the group can look back from.

        With a sliding window only the blocks that it covers need to be there.
        """
        window = self._windows[group]
        wanted = len(hashes) if window is None else -(-(window - 1) // self._pool.block_size)
        found: list[int] = []  # from right to left
        end = len(hashes)
        for index in range(len(hashes) - 1, -1, -1):
            if end - index > wanted:
                break
            block_id = self._pool.lookup(_group_key(hashes[index], group))
            if block_id is None:
                found, end = [], index
            else:
                found.append(block_id)
        return [NULL_BLOCK] * (end - len(found)) + found[::-1]

    def admit(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        full_sequence_must_fit: bool = True,
        publish: bool = True,
    ) -> bool:
        """Give a request without blocks its cached ones and room for the tokens that follow.

        On success `num_computed_tokens` stands behind the cached tokens.

        Args:
          request: holds no blocks.
          num_new_tokens: tokens to compute now, after the cached ones; at least 1.
          hit: from `find_hit`; None is no hit.
          full_sequence_must_fit: demand room for all known tokens, not only for the first chunk,
            lest a long prompt enters, starves and loses its work.
          publish: make the new blocks findable at once; False if their content is not computed in
            the step being planned.

        Returns: whether it fits; if not, nothing has changed.
        """
        pool = self._pool
        if hit is None:
            hit = PrefixHit(0, tuple([] for _ in self._windows))
        num_cached_tokens = hit.num_blocks * pool.block_size
        end = num_cached_tokens + num_new_tokens
        room = pool.num_blocks_for(request.num_tokens if full_sequence_must_fit else end)
        num_new = pool.num_blocks_for(end) - hit.num_blocks
        held = hit.block_ids
        needed = 0
        for window, table in zip(self._windows, hit.tables, strict=True):
            num_held = len(table) - table.count(NULL_BLOCK)
            most = self._peak_blocks(window, room - hit.num_blocks + num_held)
            needed += max(most - num_held, num_new)
        # A hit on a free block takes it out of the free ones just as a new block does.
        if needed + pool.num_unreferenced(held) > pool.num_free:
            return False
        # Touched first: otherwise allocation could evict what was hit.
        pool.touch(held)
        request.block_tables = [[*table, *pool.allocate(num_new)] for table in hit.tables]
        request.table_version = next(_VERSIONS)
        request.num_published_blocks = hit.num_blocks
        request.num_computed_tokens = num_cached_tokens
        if publish:
            self.publish(request, end)
        return True

    def extend(self, request: Request, num_new_tokens: int, *, publish: bool = True) -> bool:
        """Give a request that holds blocks room for its next tokens.

        Blocks that have left a sliding window become free, whether it fits or not. `publish` is as
        in `admit`.

        Returns: whether it fits; if not, nothing else has changed.
        """
        pool = self._pool
        start = request.num_computed_tokens
        end = start + num_new_tokens
        if self._sliding:
            self._release_passed(request, start)
        block_size = pool.block_size
        num_new = -(-end // block_size) - len(request.block_tables[0])
        shared = self._shared_partial_groups(request, start) if self._may_share_partial else ()
        if num_new > 0 or shared:
            if num_new * len(self._windows) + len(shared) > pool.num_free:
                return False
            for group in shared:
                self._copy_on_write(request, group, start // block_size)
            if num_new > 0:
                for table in request.block_tables:
                    table += pool.allocate(num_new)
        if publish and end // block_size > request.num_published_blocks:
            self.publish(request, end)
        return True

    def publish(self, request: Request, end: int) -> None:
        """Make findable the blocks that are full once the first `end` tokens are computed.

        Args:
          request: holds the blocks; its tokens beyond the known ones are left for later.
          end: number of tokens scheduled so far.
        """
        pool = self._pool
        num_full = min(end // pool.block_size, len(request.block_hashes))
        start = request.num_published_blocks
        if num_full <= start or request.cache_mode is CacheMode.NO_STORE:
            return
        hashes = request.block_hashes
        table = request.block_tables[0]
        parent = table[start - 1] if start else NULL_BLOCK
        for index in range(start, num_full):
            block_id = table[index]
            if pool.block_hash(block_id) is None:  # else a fork shares it and was first
                pool.register(block_id, hashes[index], parent)
            parent = block_id
        for group in range(1, len(self._windows)):
            table = request.block_tables[group]
            for index in range(start, num_full):
                block_id = table[index]
                if block_id != NULL_BLOCK and pool.block_hash(block_id) is None:
                    pool.register(block_id, _group_key(hashes[index], group))
        request.num_published_blocks = num_full
        if pool.events.is_active:
            self._announce(request, start, num_full)

    def retract(self, request: Request, num_published_blocks: int) -> None:
        """Unpublish what was published after `num_published_blocks`: it will not be computed."""
        for table in request.block_tables:
            for block_id in table[num_published_blocks : request.num_published_blocks]:
                if block_id != NULL_BLOCK:
                    self._pool.unregister(block_id)
        # A block that was to be copied into may belong to another request before the step is run.
        own = {block_id for table in request.block_tables for block_id in table}
        self._copies = [copy for copy in self._copies if copy[1] not in own]
        request.num_published_blocks = min(request.num_published_blocks, num_published_blocks)

    def can_fork(self, parent: Request, child: Request) -> bool:
        """Say whether the parent still has every block that the child's next token looks back to.

        It has not if a sliding window of its own has passed some of them.
        """
        start = min(parent.num_computed_tokens, child.num_tokens - 1)
        size = self._pool.block_size
        for group, window in self._sliding:
            table = parent.block_tables[group]
            first, last = max(0, start - window + 1) // size, -(-start // size)
            if NULL_BLOCK in table[first:last]:
                return False
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Let a request without blocks share all blocks of one that runs.

        Both may go on writing: who first writes into the last, partly filled block gets a copy of
        it. The child computes at least its last known token itself, for its logits.

        Args:
          parent: holds blocks.
          child: its known tokens start with the parent's computed ones, or end among them.
        """
        pool = self._pool
        num_shared = min(parent.num_computed_tokens, child.num_tokens - 1)
        num_blocks = pool.num_blocks_for(num_shared)
        child.block_tables = [list(table[:num_blocks]) for table in parent.block_tables]
        for table in child.block_tables:
            pool.touch(block_id for block_id in table if block_id != NULL_BLOCK)
        child.table_version = next(_VERSIONS)
        child.num_computed_tokens = num_shared
        child.num_published_blocks = min(parent.num_published_blocks, num_shared // pool.block_size)
        self._may_share_partial = True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the (source, destination) block copies that the next step needs first."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def free(self, request: Request) -> None:
        """Release every block of the request; it may hold none."""
        for table in request.block_tables:
            if self._sliding:
                self._pool.free([i for i in reversed(table) if i != NULL_BLOCK])
            else:
                self._pool.free(reversed(table))
        request.block_tables = [[] for _ in self._windows]
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def _release_passed(self, request: Request, start: int) -> None:
        """Free the blocks that no token from `start` on can see."""
        for group, window in self._sliding:
            table = request.block_tables[group]
            passed = []
            index = min(max(0, start - window + 1) // self._pool.block_size, len(table)) - 1
            while index >= 0 and table[index] != NULL_BLOCK:
                passed.append(table[index])
                table[index] = NULL_BLOCK
                index -= 1
            self._pool.free(passed)

    def _shared_partial_groups(self, request: Request, start: int) -> list[int]:
        """Return the groups in which others may read the block that token `start` goes into."""
        pool = self._pool
        index, offset = divmod(start, pool.block_size)
        if not offset:
            return []
        return [
            group
            for group, table in enumerate(request.block_tables)
            if table[index] != NULL_BLOCK
            and (pool.ref_count(table[index]) > 1 or pool.block_hash(table[index]) is not None)
        ]

    def _copy_on_write(self, request: Request, group: int, index: int) -> None:
        """Replace a shared block by a copy of its own."""
        table = request.block_tables[group]
        source = table[index]
        (destination,) = self._pool.allocate(1)
        self._pool.free([source])
        table[index] = destination
        request.table_version = next(_VERSIONS)
        self._copies.append((source, destination))

    def _announce(self, request: Request, start: int, stop: int) -> None:
        """Tell the subscribers which blocks of the request have become findable."""
        size, hashes = self._pool.block_size, request.block_hashes
        keys = tuple(extra_keys(request, i * size, (i + 1) * size) for i in range(start, stop))
        for group, table in enumerate(request.block_tables):
            stored = [i for i in range(start, stop) if table[i] != NULL_BLOCK]
            if not stored:
                continue
            self._pool.events.emit(
                BlockStored(
                    block_hashes=tuple(hashes[i] for i in stored),
                    parent_block_hash=hashes[stored[0] - 1] if stored[0] else None,
                    token_ids=tuple(request.tokens(stored[0] * size, stop * size)),
                    block_size=size,
                    lora_name=request.lora[0] if request.lora is not None else None,
                    extra_keys=tuple(keys[i - start] for i in stored),
                    group=group,
                )
            )


def _group_key(block_hash: bytes, group: int) -> bytes:
    """Return the pool's name of a block's content in one group; the first group's is the hash."""
    return block_hash + group.to_bytes(4, "big") if group else block_hash


def _split_key(key: bytes) -> tuple[bytes, int]:
    """Return hash and group of a key; the first group's keys have the hash's own length."""
    is_plain = len(key) % 8 == 0
    return (key, 0) if is_plain else (key[:-4], int.from_bytes(key[-4:], "big"))
