"""Whole KV blocks between cache, staging memory and each other: gather, scatter, copy.

A block's content is its slice of every array of the cache: all layers, and its token ids. Blocks
outside the cache are therefore a `KVCache` of their own with as many blocks as were gathered, and
every operation is one map over the leaves: what a later cache adds (scales, layers of another
shape) moves along. The functions may be traced; `BlockCopier` holds them compiled for a few sizes.
"""

import graphlib
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array

from paged.kv_cache import NULL_BLOCK, KVCache

_SIZES = (1, 8, 32, 128)
# Staging memory lies beside the cache: a program may not ask the device for much of it at once.
MAX_STAGED_BYTES = 128 * 2**20


def gather_blocks(kv_cache: KVCache, block_ids: Array) -> KVCache:
    """Return a small cache that holds copies of these blocks, in their order.

    Args:
      kv_cache: read only.
      block_ids: int32 `[num_copied]`, each below `num_blocks`; repetitions are fine.

    Source: vLLM `swap_blocks`.
    """
    blocks: KVCache = jax.tree.map(lambda leaf: leaf.at[block_ids].get(mode="clip"), kv_cache)
    return blocks


def scatter_blocks(kv_cache: KVCache, block_ids: Array, blocks: KVCache) -> KVCache:
    """Return the cache with `blocks` written over these of its blocks; in place if donated.

    Args:
      kv_cache: the cache.
      block_ids: int32 `[num_copied]`; distinct, but for the null block.
      blocks: as `gather_blocks` returns them, `num_copied` blocks.
    """
    updated: KVCache = jax.tree.map(
        lambda leaf, rows: leaf.at[block_ids].set(rows), kv_cache, blocks
    )
    return updated


def copy_blocks(kv_cache: KVCache, sources: Array, destinations: Array) -> KVCache:
    """Return the cache with blocks copied within it, for copy-on-write; in place if donated.

    All reads come before all writes: a source that is also a destination gives its old content.

    Args:
      kv_cache: the cache.
      sources: int32 `[num_copied]`.
      destinations: int32 `[num_copied]`; distinct, but for the null block.

    Source: vLLM `copy_blocks`.
    """
    return scatter_blocks(kv_cache, destinations, gather_blocks(kv_cache, sources))


class BlockCopier:
    """The three operations, compiled ahead for a few numbers of blocks and padded to them.

    Padding names the null block: it is read, and overwritten with what is passed for it.

    One program covers all layers. For 30 layers XLA:CPU compiles each in 0.1 s, because a layer's
    blocks stay an array of their own: with one array of all layers as the staging layout, the
    scatter took twenty times as long to compile and the gather ten times as long to run.

    Args:
      kv_cache: the cache, or its abstract shape; only shapes, dtypes and placement are kept.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._cache = jax.tree.map(_abstract, kv_cache)
        self.num_blocks = kv_cache.num_blocks
        self.block_bytes: int = sum(
            math.prod(leaf.shape[1:]) * int(leaf.dtype.itemsize)
            for leaf in jax.tree.leaves(kv_cache)
        )
        self.sizes = tuple(n for n in _SIZES if n * self.block_bytes <= MAX_STAGED_BYTES) or (1,)
        self._gather: dict[int, Callable[[KVCache, np.ndarray], KVCache]] = {}
        self._scatter: dict[int, Callable[[KVCache, np.ndarray, KVCache], KVCache]] = {}
        self._copy: dict[int, Callable[[KVCache, np.ndarray, np.ndarray], KVCache]] = {}

    def warmup(self, *, tiers: bool = False) -> None:
        """Compile `copy`, and with `tiers` also `gather` and `scatter`."""
        placement = jax.tree.map(lambda leaf: leaf.sharding, self._cache)
        for size in self.sizes:
            ids = np.zeros(size, np.int32)
            copy = jax.jit(copy_blocks, donate_argnums=0, out_shardings=placement)
            self._copy[size] = copy.lower(self._cache, ids, ids).compile()
            if tiers:
                gather = jax.jit(gather_blocks, out_shardings=placement)
                self._gather[size] = gather.lower(self._cache, ids).compile()
                scatter = jax.jit(scatter_blocks, donate_argnums=0, out_shardings=placement)
                blocks = self.staged_shape(size)
                self._scatter[size] = scatter.lower(self._cache, ids, blocks).compile()

    def staged_shape(self, num_blocks: int) -> KVCache:
        """Return shapes, dtypes and placement of `num_blocks` blocks outside the cache."""
        shape: KVCache = jax.tree.map(lambda leaf: _abstract(leaf, num_blocks), self._cache)
        return shape

    def split(self, num_blocks: int) -> list[int]:
        """Return compiled sizes that together hold `num_blocks`; only the last may have padding.

        At most half of a program is padding, so few blocks take several small programs.
        """
        sizes = []
        while num_blocks > 0:
            fitting = [size for size in self.sizes if num_blocks <= size <= 2 * num_blocks]
            size = fitting[0] if fitting else max(s for s in self.sizes if s <= num_blocks)
            sizes.append(size)
            num_blocks -= size
        return sizes

    def gather(self, kv_cache: KVCache, block_ids: Sequence[int]) -> list[KVCache]:
        """Start copying these blocks out; returns one small cache for each size of `split`.

        Dispatch the gather before the step that overwrites the blocks: JAX then keeps the order,
        also where that step donates the cache.

        Raises:
          ValueError: an id is the null block's or not in the cache.
          RuntimeError: before `warmup(tiers=True)`.
        """
        self._check_ids("block_ids", block_ids)
        programs = _warm(self._gather, "gather", "tiers=True")
        return [programs[len(ids)](kv_cache, ids) for ids in self._padded(block_ids)]

    def scatter(self, kv_cache: KVCache, block_ids: Sequence[int], blocks: KVCache) -> KVCache:
        """Write staged blocks into the cache, which is donated.

        Args:
          kv_cache: the cache; use the returned one from then on.
          block_ids: distinct blocks.
          blocks: on the device, one of `sizes` blocks; those past `block_ids` are padding, and
            must be finite because they land in the null block.

        Raises:
          ValueError: an id is the null block's, twice there, or not in the cache, or there are
            more of them than `blocks`.
          RuntimeError: before `warmup(tiers=True)`.
        """
        self._check_ids("block_ids", block_ids, distinct=True)
        size = blocks.num_blocks
        if len(block_ids) > size:
            raise ValueError(f"{len(block_ids)} block_ids for {size} staged blocks; split them.")
        program = _warm(self._scatter, "scatter", "tiers=True")[size]
        return program(kv_cache, _pad(block_ids, size), blocks)

    def copy(
        self, kv_cache: KVCache, sources: Sequence[int], destinations: Sequence[int]
    ) -> KVCache:
        """Copy blocks within the cache, which is donated; all reads come before all writes.

        Raises:
          ValueError: an id is the null block's or not in the cache, a destination is there twice,
            the numbers differ, or there are too many for one program and they form a cycle.
          RuntimeError: before `warmup`.
        """
        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} sources for {len(destinations)} destinations.")
        self._check_ids("sources", sources)
        self._check_ids("destinations", destinations, distinct=True)
        programs = _warm(self._copy, "copy")
        # One program wherever possible, padded as it may be: it reads all before it writes any.
        largest = self.sizes[-1]
        size = min((size for size in self.sizes if size >= len(sources)), default=largest)
        if len(sources) > largest:
            sources, destinations = _reads_before_writes(sources, destinations)
        for start in range(0, len(sources), size):
            part = slice(start, start + size)
            read, written = _pad(sources[part], size), _pad(destinations[part], size)
            kv_cache = programs[size](kv_cache, read, written)
        return kv_cache

    def _padded(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        padded, start = [], 0
        for size in self.split(len(block_ids)):
            padded.append(_pad(block_ids[start : start + size], size))
            start += size
        return padded

    def _check_ids(self, name: str, block_ids: Sequence[int], *, distinct: bool = False) -> None:
        wrong = [i for i in block_ids if not NULL_BLOCK < i < self.num_blocks]
        if wrong:
            raise ValueError(f"{name} has {wrong[0]}; blocks are 1 to {self.num_blocks - 1}.")
        if distinct and len(set(block_ids)) < len(block_ids):
            raise ValueError(f"{name}={list(block_ids)} names a block twice: who writes it last?")


def _abstract(
    leaf: Array | jax.ShapeDtypeStruct, num_blocks: int | None = None
) -> jax.ShapeDtypeStruct:
    shape = leaf.shape if num_blocks is None else (num_blocks, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]


def _pad(block_ids: Sequence[int], size: int) -> np.ndarray:
    padded = np.full(size, NULL_BLOCK, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded


def _warm[P](programs: dict[int, P], name: str, argument: str = "") -> dict[int, P]:
    if not programs:
        raise RuntimeError(f"Call warmup({argument}) before {name}(): nothing is compiled yet.")
    return programs


def _reads_before_writes(
    sources: Sequence[int], destinations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Order copies for several programs: who reads a block goes before who writes it."""
    readers: dict[int, set[int]] = {}
    for index, source in enumerate(sources):
        readers.setdefault(source, set()).add(index)
    before = {i: readers.get(written, set()) - {i} for i, written in enumerate(destinations)}
    try:
        order = list(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError:
        raise ValueError(
            f"{len(sources)} copies form a cycle and are too many for one program; copy the cycle "
            "on its own."
        ) from None
    return [sources[i] for i in order], [destinations[i] for i in order]
