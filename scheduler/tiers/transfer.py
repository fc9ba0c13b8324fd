"""`TierTransfer`: blocks between the JAX device and the host, both ways."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from paged.block_copy import BlockCopier
from paged.kv_cache import KVCache
from paged.scheduler.tiers.device import Submit
from paged.scheduler.tiers.host_blocks import HostBlocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks on the device, ready to be written into the cache.

    Attributes:
      block_ids: where they go.
      parts: small caches that hold them in this order; the last may be longer than is left.
    """

    block_ids: tuple[int, ...]
    parts: tuple[KVCache, ...]


class TierTransfer:
    """The device's side of the tiers; `save` and `restore` are the runner's, on its thread.

    Args:
      copier: of the cache, warm with `tiers=True`.
    """

    def __init__(self, copier: BlockCopier) -> None:
        self._copier = copier
        leaves = jax.tree.leaves(copier.staged_shape(1))
        self._leaf_bytes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
        self._submit: Submit | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers' keys and values, and the token ids."""
        return self._copier.block_bytes

    def connect(self, submit: Submit) -> None:
        """Say where gathered blocks go (`TierManager` does so)."""
        self._submit = submit

    def save(self, kv_cache: KVCache, saves: Sequence[tuple[int, bytes]]) -> None:
        """Start copying evicted blocks out of the cache, before the step that overwrites them.

        Only dispatches: the thread of the tiers waits for the copies. A device that has no memory
        for them drops them.

        Args:
          kv_cache: read only; the step may donate it right after.
          saves: (block, key), from `take_saves`.

        Raises: RuntimeError before `connect`.
        """
        if self._submit is None:
            raise RuntimeError("Call connect() before save(): a TierManager does.")
        start = 0
        for size in self._copier.split(len(saves)):
            part = saves[start : start + size]
            keys = [key for _, key in part]
            start += size
            try:
                (gathered,) = self._copier.gather(kv_cache, [block_id for block_id, _ in part])
            except jax.errors.JaxRuntimeError:
                logger.warning("No device memory to save %d KV blocks.", len(part), exc_info=True)
                self._submit(keys, None)
            else:
                self._submit(keys, gathered)

    def restore(self, kv_cache: KVCache, payloads: Iterable[object]) -> KVCache:
        """Write staged blocks into the cache, which is donated; use the returned one.

        Args:
          kv_cache: the cache.
          payloads: of `take_finished`; None is skipped.

        Raises: TypeError if a payload is not from `stage`.
        """
        for payload in payloads:
            if payload is None:
                continue
            if not isinstance(payload, StagedBlocks):
                raise TypeError(f"payload is a {type(payload).__name__}; pass a LoadResult's.")
            start = 0
            for part in payload.parts:
                ids = payload.block_ids[start : start + part.num_blocks]
                kv_cache = self._copier.scatter(kv_cache, ids, part)
                start += part.num_blocks
        return kv_cache

    def fetch(self, gathered: object) -> HostBlocks:
        """Wait for gathered blocks; padding at their end stays."""
        arrays = jax.tree.leaves(gathered)
        for array in arrays:
            array.copy_to_host_async()  # all at once, not one after the other
        leaves = [np.asarray(array) for array in arrays]
        return HostBlocks([leaf.reshape(len(leaf), -1).view(np.uint8) for leaf in leaves])

    def allocate(self, num_blocks: int) -> HostBlocks:
        """Return host memory for blocks, and for the padding of the programs that take them."""
        return HostBlocks.empty(sum(self._copier.split(num_blocks)), self._leaf_bytes)

    def stage(self, blocks: HostBlocks, block_ids: Sequence[int]) -> StagedBlocks:
        """Bring the first `len(block_ids)` of these blocks to the device, and wait for them."""
        sizes = self._copier.split(len(block_ids))
        for leaf in blocks.leaves:
            leaf[len(block_ids) : sum(sizes)] = 0  # padding lands in the null block: finite
        parts, start = [], 0
        for size in sizes:
            shapes, structure = jax.tree.flatten(self._copier.staged_shape(size))
            rows = [
                leaf[start : start + size].view(shape.dtype).reshape(shape.shape)
                for leaf, shape in zip(blocks.leaves, shapes, strict=True)
            ]
            placed = jax.device_put(rows, [shape.sharding for shape in shapes])
            parts.append(jax.tree.unflatten(structure, placed))
            start += size
        jax.block_until_ready(parts)  # type: ignore[no-untyped-call]
        return StagedBlocks(tuple(block_ids), tuple(parts))
