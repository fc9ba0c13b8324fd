"""Blocks of a real cache go down and come up byte for byte, beside steps that donate the cache."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.block_copy import BlockCopier
from paged.kv_cache import KVCache, KVCacheSpec
from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.manager import TierManager
from paged.scheduler.tiers.transfer import TierTransfer
from tests.scheduler.tiers.fakes import name

NUM_BLOCKS = 96
KEYS = [name(number) for number in range(NUM_BLOCKS)]


def spec_of(dtype: str) -> KVCacheSpec:
    return KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)


def random_cache(dtype: str) -> tuple[KVCache, list[np.ndarray]]:
    """A cache of random bits, NaN and infinities among them, and a copy on the host."""
    rng = np.random.default_rng(0)
    spec = spec_of(dtype)
    shape = spec.layer_shape(NUM_BLOCKS)
    num_bytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    layers = [
        np.frombuffer(rng.bytes(num_bytes), dtype=jnp.dtype(dtype)).reshape(shape)
        for _ in range(spec.num_layers)
    ]
    arrays = [*layers, rng.integers(0, 9999, (NUM_BLOCKS, spec.block_size), np.int32)]
    *device_layers, token_ids = (jnp.array(array) for array in arrays)
    return KVCache(tuple(device_layers), token_ids), arrays


@functools.cache
def warm_copier(dtype: str) -> BlockCopier:
    copier = BlockCopier(random_cache(dtype)[0])
    copier.warmup(tiers=True)
    return copier


@functools.partial(jax.jit, donate_argnums=0)
def step(cache: KVCache) -> KVCache:
    """Overwrite everything, as a step does that donates the cache."""
    return jax.tree.map(lambda leaf: leaf * jnp.zeros((), leaf.dtype), cache)


def block_bytes_of(cache: KVCache, block_id: int) -> bytes:
    return b"".join(np.asarray(leaf[block_id]).tobytes() for leaf in jax.tree.leaves(cache))


def expected(arrays: list[np.ndarray], block_id: int) -> bytes:
    return b"".join(array[block_id].tobytes() for array in arrays)


def open_manager(dtype: str, *, host_blocks: int = 0, folder: Path | None = None):
    transfer = TierTransfer(warm_copier(dtype))
    size = transfer.block_bytes
    host = HostTier(host_blocks * size, size) if host_blocks else None
    disk = None
    if folder is not None:
        disk = DiskTier(folder, namespace="n", block_bytes=size, capacity_bytes=200 * size)
    return transfer, TierManager(transfer, host=host, disk=disk, max_inflight_bytes=99 * size)


def load(
    manager: TierManager, transfer: TierTransfer, cache: KVCache, block_ids: list[int]
) -> tuple[KVCache, int, set[str]]:
    """Load the first keys into these blocks."""
    manager.start_load("r", KEYS[: len(block_ids)], block_ids)
    assert manager.wait(300)
    (result,) = manager.take_finished()
    cache = transfer.restore(cache, [result.payload])
    return cache, result.num_blocks_ok, set(result.media)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 5, 8, 47])
@pytest.mark.parametrize("tiers", ["host", "disk", "disk after a restart", "host over disk"])
def test_blocks_come_back_byte_for_byte(tmp_path, dtype: str, count: int, tiers: str):
    options = {
        "host": {"host_blocks": 64},
        "host over disk": {"host_blocks": 3, "folder": tmp_path},
    }.get(tiers, {"folder": tmp_path})
    cache, arrays = random_cache(dtype)
    transfer, manager = open_manager(dtype, **options)
    saved = (np.random.default_rng(count).permutation(NUM_BLOCKS - 1) + 1)[:count].tolist()
    for block_id, key in zip(saved, KEYS, strict=False):
        manager.on_evict(block_id, key)
    transfer.save(cache, manager.take_saves())
    cache = step(cache)  # without waiting: the order of dispatch must be enough
    if tiers == "disk after a restart":
        assert manager.flush(300)
        manager.close()
        transfer, manager = open_manager(dtype, **options)
        assert manager.flush(300)
    targets = list(range(NUM_BLOCKS - count, NUM_BLOCKS))
    cache, num_ok, media = load(manager, transfer, cache, targets)
    manager.close()
    assert num_ok == count
    assert media <= {"host", "disk"}
    for source, target in zip(saved, targets, strict=True):
        assert block_bytes_of(cache, target) == expected(arrays, source)
    # The step left zeros (NaN where there was none finite) in all others; restore left them alone.
    after_step = step(random_cache(dtype)[0])
    for block_id in set(range(1, NUM_BLOCKS)) - set(targets):
        assert block_bytes_of(cache, block_id) == block_bytes_of(after_step, block_id)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_only_the_leading_good_blocks_are_written(tmp_path, dtype: str):
    cache, arrays = random_cache(dtype)
    transfer, manager = open_manager(dtype, folder=tmp_path)
    for block_id in range(1, 13):
        manager.on_evict(block_id, KEYS[block_id - 1])
    transfer.save(cache, manager.take_saves())
    assert manager.flush(300)
    disk = DiskTier(tmp_path, namespace="n", block_bytes=transfer.block_bytes, capacity_bytes=10**9)
    Path(disk.path(KEYS[7])).write_bytes(b"rotten")
    cache, num_ok, _ = load(manager, transfer, cache, list(range(50, 62)))
    manager.close()
    assert num_ok == 7
    for offset in range(7):
        assert block_bytes_of(cache, 50 + offset) == expected(arrays, 1 + offset)
    for block_id in range(57, NUM_BLOCKS):
        assert block_bytes_of(cache, block_id) == expected(arrays, block_id)
    # Padding landed in the null block, where masked reads need finite numbers.
    assert all(np.isfinite(np.asarray(leaf[0], np.float32)).all() for leaf in cache.layers)


def test_steps_run_while_blocks_are_on_their_way():
    cache, arrays = random_cache("float32")
    transfer, manager = open_manager("float32", host_blocks=64)
    manager.on_evict(7, KEYS[0])
    transfer.save(cache, manager.take_saves())
    manager.start_load("r", KEYS[:1], [11])
    for _ in range(10):
        cache = step(cache)
    assert manager.wait(300)
    payloads = [result.payload for result in manager.take_finished()]
    cache = transfer.restore(cache, payloads)
    manager.close()
    assert block_bytes_of(cache, 11) == expected(arrays, 7)


def test_device_without_memory_loses_the_save_and_nothing_else(caplog):
    class FullDevice(BlockCopier):
        def gather(self, kv_cache, block_ids):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    cache, _ = random_cache("float32")
    transfer = TierTransfer(FullDevice(cache))
    size = transfer.block_bytes
    manager = TierManager(transfer, host=HostTier(4 * size, size))
    manager.on_evict(1, KEYS[0])
    transfer.save(cache, manager.take_saves())
    assert manager.num_available(KEYS[:1]) == 0
    assert manager.stats().num_saves_failed == 1
    assert "No device memory to save 1 KV blocks" in caplog.text
    manager.close()


def test_block_is_all_layers_and_the_token_ids():
    transfer = TierTransfer(BlockCopier(random_cache("bfloat16")[0]))
    spec = spec_of("bfloat16")
    assert transfer.block_bytes == spec.bytes_per_block + 4 * spec.block_size


def test_save_before_a_manager_is_connected_is_refused():
    transfer = TierTransfer(BlockCopier(random_cache("float32")[0]))
    with pytest.raises(RuntimeError, match=r"Call connect\(\) before save\(\)"):
        transfer.save(random_cache("float32")[0], [(1, KEYS[0])])


def test_payload_of_somebody_else_is_refused():
    cache, _ = random_cache("float32")
    transfer = TierTransfer(BlockCopier(cache))
    assert transfer.restore(cache, [None]) is cache
    with pytest.raises(TypeError, match="payload is a list; pass a LoadResult's"):
        transfer.restore(cache, [[1]])
