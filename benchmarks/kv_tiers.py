"""Bytes per second of KV blocks between device, host memory and disk; the engine's share of it.

python benchmarks/kv_tiers.py --folder /tmp --dtype bfloat16

The default shape is SmolLM2-135M's. Reads from the disk are served by the system's page cache
unless more is written than fits into memory.
"""

import argparse
import hashlib
import random
import statistics
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
from tqdm import tqdm

from paged.block_copy import BlockCopier
from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.manager import TierManager
from paged.scheduler.tiers.transfer import TierTransfer

type Samples = dict[str, list[float]]


def measure(
    cache: KVCache, copier: BlockCopier, tier: HostTier | DiskTier, num_blocks: int, salt: int
) -> tuple[KVCache, dict[str, float]]:
    """Send blocks down and up once; return the cache and the seconds of each part."""
    transfer = TierTransfer(copier)
    host, disk = (tier, None) if isinstance(tier, HostTier) else (None, tier)
    size = 2 * num_blocks * transfer.block_bytes
    manager = TierManager(transfer, host=host, disk=disk, max_inflight_bytes=size)
    manager.flush()
    keys = [b"%032d" % (salt * num_blocks + number) for number in range(num_blocks)]
    block_ids = range(1, num_blocks + 1)
    started = time.perf_counter()
    for block_id, key in zip(block_ids, keys, strict=True):
        manager.on_evict(block_id, key)
    transfer.save(cache, manager.take_saves())
    dispatched = time.perf_counter()
    manager.flush()
    saved = time.perf_counter()
    manager.start_load("r", keys, block_ids)
    manager.wait()
    staged = time.perf_counter()
    (result,) = manager.take_finished()
    assert result.num_blocks_ok == num_blocks
    cache = transfer.restore(cache, [result.payload])
    jax.block_until_ready(cache)
    restored = time.perf_counter()
    manager.close()
    seconds = {
        f"device to {tier.medium}": saved - started,
        "  of it on the engine's thread": dispatched - started,
        f"{tier.medium} to device": restored - saved,
        "  of it on the engine's thread (scatter)": restored - staged,
    }
    return cache, {f"{tier.medium}: {part}": value for part, value in seconds.items()}


def checksum_gib_per_second() -> dict[str, float]:
    """Return what the candidates for the checksum of a block's file reach, best of five."""
    data = random.Random(0).randbytes(32 * 2**20)
    candidates: dict[str, Callable[[bytes], object]] = {
        "crc32": zlib.crc32,
        "adler32": zlib.adler32,
        "sha1": hashlib.sha1,
        "sha256": hashlib.sha256,
        "blake2b": hashlib.blake2b,
    }
    best = dict.fromkeys(candidates, 0.0)
    for _ in range(5):
        for name, checksum in candidates.items():
            started = time.perf_counter()
            checksum(data)
            best[name] = max(best[name], 1 / 32 / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="of the disk tier; default: the system's temporary one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-layers", type=int, default=30)
    parser.add_argument("--num-kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--num-blocks", type=int, default=128, help="moved at once")
    parser.add_argument("--runs", type=int, default=7, help="the first one is discarded")
    parser.add_argument("--checksums", action="store_true", help="measure only these")
    args = parser.parse_args()
    if args.checksums:
        for name, speed in checksum_gib_per_second().items():
            print(f"{name:<8} {speed:.1f} GiB/s")
        return
    spec = KVCacheSpec(
        args.num_layers, args.num_kv_heads, args.head_dim, args.block_size, args.dtype
    )
    cache = allocate_kv_cache(spec, args.num_blocks + 1)
    copier = BlockCopier(cache)
    started = time.perf_counter()
    copier.warmup(tiers=True)
    print(f"compiled for {copier.sizes} blocks in {time.perf_counter() - started:.2f} s")
    num_bytes = args.num_blocks * copier.block_bytes
    samples: Samples = defaultdict(list)
    host = HostTier(num_bytes, copier.block_bytes)  # one for all runs: its pages are touched once
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for run in tqdm(range(args.runs), desc="Moving", unit="run"):
            disk = DiskTier(
                Path(folder),
                namespace=f"run{run}",
                block_bytes=copier.block_bytes,
                capacity_bytes=2 * num_bytes,
            )
            host.clear()
            for tier in (host, disk):
                cache, seconds = measure(cache, copier, tier, args.num_blocks, run)
                if run:
                    for part, value in seconds.items():
                        samples[part].append(value)
    device = jax.devices()[0].device_kind
    mib = num_bytes / 2**20
    print(f"{args.num_blocks} blocks, {mib:.0f} MiB of {args.dtype}, on {device}; median (range):")
    for part, values in samples.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        rate = "" if "of it" in part else f", {mib / 1024 / middle:.2f} GiB/s"
        print(f"  {part:<48} {middle * 1e3:7.1f} ms ({low * 1e3:.1f}-{high * 1e3:.1f}){rate}")


if __name__ == "__main__":
    main()
