"""From settings to what moves whole blocks: copies on the device, and the tiers below it."""

import shutil
from collections.abc import Sequence
from typing import Any

from paged.block_copy import BlockCopier
from paged.kv_cache import KVCache
from paged.models.fingerprint import weights_fingerprint
from paged.scheduler.capacity import GIB
from paged.scheduler.config import EngineConfig
from paged.scheduler.tiers.disk import DiskTier, make_namespace, make_offloading_directory
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.manager import TierManager
from paged.scheduler.tiers.transfer import TierTransfer

# A disk without a limit of its own keeps this share of what is free now for everybody else.
_SPARE_DISK_SHARE = 0.1


class BlockMover:
    """What the runner calls for whole blocks before a step.

    Args:
      kv_cache: the cache, or its abstract shape.
      has_tiers: whether blocks go below the device.
    """

    def __init__(self, kv_cache: KVCache, *, has_tiers: bool) -> None:
        self._copier = BlockCopier(kv_cache)
        self.transfer = TierTransfer(self._copier) if has_tiers else None

    def warmup(self) -> None:
        """Compile everything that can be asked for."""
        self._copier.warmup(tiers=self.transfer is not None)

    def save(self, kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Start copying (block, key) pairs to the tiers."""
        assert self.transfer is not None
        self.transfer.save(kv_cache, blocks)

    def restore(self, kv_cache: KVCache, contents: Sequence[object]) -> KVCache:
        """Return the cache, donated, with staged contents written."""
        assert self.transfer is not None
        return self.transfer.restore(kv_cache, contents)

    def copy(self, kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> KVCache:
        """Return the cache, donated, with each (source, destination) block copied."""
        sources, destinations = zip(*pairs, strict=True)
        return self._copier.copy(kv_cache, sources, destinations)


def check_offloading(config: EngineConfig) -> None:
    """Check early what would otherwise fail after the weights are loaded.

    Raises: ValueError if the folder cannot be written.
    """
    if config.kv_offloading_path is not None:
        make_offloading_directory(config.kv_offloading_path)


def make_tiers(
    config: EngineConfig, transfer: TierTransfer | None, params: Any
) -> TierManager | None:
    """Return the tiers that the settings ask for; None if they ask for none.

    Args:
      config: resolved settings.
      transfer: the device's side.
      params: the model's parameters, which name its folder on the disk.

    Raises: ValueError if a size holds not even one block.
    """
    if transfer is None:
        return None
    disk = None
    if config.kv_offloading_path is not None:
        folder = make_offloading_directory(config.kv_offloading_path)
        capacity_bytes = int((config.kv_offloading_disk_size or 0) * GIB)
        if config.kv_offloading_disk_size is None:
            capacity_bytes = int(shutil.disk_usage(folder).free * (1 - _SPARE_DISK_SHARE))
        namespace = make_namespace(
            {
                "weights": weights_fingerprint(params),
                "kv_cache_dtype": config.kv_cache_dtype,
                "block_size": config.block_size,
                "hash": config.prefix_caching_hash_algo,
                "layout": "layers[2, kv_heads, block_size, head_dim] token_ids",
            }
        )
        disk = DiskTier(
            folder,
            namespace=namespace,
            block_bytes=transfer.block_bytes,
            capacity_bytes=capacity_bytes,
        )
    host = HostTier(int(config.kv_offloading_size * GIB), transfer.block_bytes)
    return TierManager(transfer, host=host, disk=disk)
