"""Cost-aware: evict what is cheapest to compute again per expected use."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paged.scheduler.eviction.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Work to compute a token again: linear layers, and attention to all tokens before it.

    Attributes:
      linear_flops: per token, whatever its position: 2 per parameter that a token meets.
      attention_flops: per token and per token before it. The default ratio to `linear_flops` is
        that of Llama 3.1 8B: attention costs as much as all else at 30,000 tokens.
      block_size: tokens per block.

    Raises: ValueError if a cost is negative, `linear_flops` is zero or `block_size` is below 1.
    """

    linear_flops: float = 1.0
    attention_flops: float = 1 / 30_000
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.linear_flops <= 0 or self.attention_flops < 0 or self.block_size < 1:
            raise ValueError(
                f"{self} must have linear_flops > 0, the others >= 0, block_size >= 1."
            )

    @classmethod
    def of_model(
        cls,
        *,
        num_parameters: int,
        num_layers: int,
        num_q_heads: int,
        head_dim: int,
        block_size: int,
    ) -> "RecomputeCost":
        """Return the cost for a model's dimensions; of experts, count those a token meets.

        Attention is two products, scores and values, of 2 operations per layer, head and feature.
        """
        attention = 4.0 * num_layers * num_q_heads * head_dim
        return cls(2.0 * num_parameters, attention, block_size)

    def of_block(self, depth: int) -> float:
        """Return the cost of the block at this depth, in units of a block's linear layers."""
        position = (depth + 0.5) * self.block_size
        return 1.0 + position * self.attention_flops / self.linear_flops


class CostAware(EvictionPolicy):
    """Evict the leaf with the least uses times cost, aged by a clock.

    A block's score is the clock at its last release plus uses x cost; the clock is the score of the
    last victim, so what is not used again is overtaken in the end. Only leaves compete: a block is
    worth nothing without those before it, which therefore outlive it.

    Source: Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
    policy, HP Labs 1998; recompute cost instead of size as in Marconi, arXiv:2411.19379.
    """

    # A first block that is never used again may score below the second one of another chain.
    is_closed = False

    def __init__(self, cost: RecomputeCost | None = None) -> None:
        self._cost = RecomputeCost() if cost is None else cost
        self._clock = 0.0
        self._uses: dict[int, int] = {}
        self._scores: dict[int, tuple[float, int]] = {}
        self._num_released = 0
        # Leaves, and blocks that were: (score, order of release, block). Entries of old scores and
        # of blocks that got children stay until they come up.
        self._leaves: list[tuple[float, int, int]] = []

    def release(self, block_ids: Sequence[int]) -> None:
        """Score each block."""
        for block_id in block_ids:
            uses = self._uses.setdefault(block_id, 1)
            score = self._clock + uses * self._cost.of_block(self._cache.depth(block_id))
            self._num_released += 1
            self._scores[block_id] = score, self._num_released
            if self._cache.is_leaf(block_id):
                self._push(block_id)

    def _push(self, block_id: int) -> None:
        if len(self._leaves) > 2 * len(self._scores) + 64:
            self._rebuild()
        heapq.heappush(self._leaves, (*self._scores[block_id], block_id))

    def _rebuild(self) -> None:
        self._leaves = [
            (*score, block_id)
            for block_id, score in self._scores.items()
            if self._cache.is_leaf(block_id)
        ]
        heapq.heapify(self._leaves)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take out and count."""
        for block_id in block_ids:
            self._uses[block_id] = self._uses.get(block_id, 1) + 1
            self._scores.pop(block_id, None)

    def victims(self, count: int) -> list[int]:
        """Return the leaf of least score: one, for the next may be the block before it."""
        while True:
            while self._leaves:
                score, order, block_id = self._leaves[0]
                if self._scores.get(block_id) == (score, order) and self._cache.is_leaf(block_id):
                    self._clock = max(self._clock, score)
                    return [block_id]
                heapq.heappop(self._leaves)
            # A block that became a leaf by a duplicate of it was not announced.
            self._rebuild()

    def drop(self, block_ids: Sequence[int]) -> None:
        """Take out; the blocks before these may be leaves now."""
        for block_id in block_ids:
            self._uses.pop(block_id, None)
            self._scores.pop(block_id, None)
        for block_id in block_ids:
            parent = self._cache.parent(block_id)
            if parent in self._scores:
                self._push(parent)

    def clear(self) -> None:
        """Forget contents and the clock."""
        self._uses.clear()
        self._scores.clear()
        self._leaves.clear()
        self._clock = 0.0

    def released(self) -> list[int]:
        """Return the blocks by score; of a chain the last goes first whatever its score."""
        return sorted(self._scores, key=self._scores.__getitem__)
