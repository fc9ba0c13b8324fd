"""Attention of one layer on a CPU: the native kernel against XLA, taking turns in one process.

python benchmarks/attention.py --heads 9 3 64

Each timed call runs several layers with caches of their own, so that none stays in a CPU's cache.
"""

import argparse
import functools
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from paged.attention import ragged_paged_attention
from paged.native.library import load_library

BLOCK_SIZE = 16


def make_arguments(args: argparse.Namespace, batch: int, context: int, rows: int) -> tuple:
    """Return queries, layers of cache with shuffled blocks, and the tables of a batch."""
    q_heads, kv_heads, head_dim = args.heads
    blocks = -(-context // BLOCK_SIZE)
    num_blocks = batch * blocks + 1
    rng = np.random.default_rng(0)
    tables = rng.permutation(np.arange(1, num_blocks)).astype(np.int32).reshape(batch, blocks)
    shape = (num_blocks, 2, kv_heads, BLOCK_SIZE, head_dim)
    values = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(args.kv_cache_dtype)
    layer_bytes = values.size * values.dtype.itemsize
    # At least 128 MB, which no cache holds, and at most 1 GB.
    layers = max(2, min(64, (128 << 20) // layer_bytes + 1, (1 << 30) // layer_bytes + 1))
    q = jnp.asarray(rng.standard_normal((batch * rows, q_heads, head_dim)), args.dtype)
    return (
        q,
        [values + 0 for _ in range(layers)],
        jnp.asarray(tables),
        jnp.full(batch, context, jnp.int32),
        jnp.arange(0, batch * rows + 1, rows, dtype=jnp.int32),
    )


def attend_layers(q, layers, block_tables, seq_lens, query_start_loc, *, backend):
    """Attend to layer after layer, each with the queries that the last one gave."""
    for cache in layers:
        q = ragged_paged_attention(
            q, cache, block_tables, seq_lens, query_start_loc, backend=backend
        )
    return q


def seconds_of(call, arguments: tuple) -> float:
    started = time.perf_counter()
    call(*arguments).block_until_ready()
    return time.perf_counter() - started


def measure(args: argparse.Namespace, batch: int, context: int, rows: int) -> dict:
    """Print and return how long a layer takes with each backend."""
    arguments = make_arguments(args, batch, context, rows)
    layers = arguments[1]
    calls = {
        backend: jax.jit(functools.partial(attend_layers, backend=backend))
        for backend in args.backends
    }
    times: dict[str, list[float]] = {backend: [] for backend in calls}
    for turn in range(args.turns + 1):
        for backend, call in calls.items():
            seconds = seconds_of(call, arguments) / len(layers)
            if turn:  # the first compiles
                times[backend].append(seconds)
    q_heads, kv_heads, head_dim = args.heads
    kv_bytes = batch * context * 2 * kv_heads * head_dim * layers[0].dtype.itemsize
    # A row sees half of its own chunk on average.
    seen = batch * rows * (context - (rows - 1) / 2)
    flops = 4 * q_heads * head_dim * seen
    result = {"batch": batch, "context": context, "rows": rows, "layers": len(layers)}
    for backend, samples in times.items():
        best, median = min(samples), statistics.median(samples)
        result[backend] = {"best_seconds": best, "median_seconds": median}
        print(
            f"{batch:3} x {context:4} context, {rows:4} rows each, {backend:6}: median "
            f"{median * 1e6:9.1f} us, best {best * 1e6:9.1f} us = {kv_bytes / best / 1e9:5.1f} "
            f"GB/s of KV, {flops / best / 1e9:6.1f} GFLOP/s",
            flush=True,
        )
    if len(times) == 2:
        first, second = times.values()
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        result["ratio"] = statistics.median(ratios)
        print(f"    {' over '.join(reversed(list(times)))}: {result['ratio']:.2f}, median of turns")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--heads", type=int, nargs=3, default=(9, 3, 64), metavar=("Q", "KV", "DIM")
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="bfloat16", help="such as float8_e4m3fn")
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 16, 64), help="of decodes")
    parser.add_argument("--contexts", type=int, nargs="*", default=(256, 1024, 4096))
    parser.add_argument("--prefills", type=int, nargs="*", default=(256, 1024, 4096))
    parser.add_argument("--backends", nargs="+", default=("native", "xla"))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--native-cache-dir", default="~/.cache/paged/native")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    reason = load_library(os.path.expanduser(args.native_cache_dir))
    if reason is not None and "native" in args.backends:
        raise SystemExit(f"no native kernels: {reason}")
    results = [measure(args, b, context, 1) for b in args.batches for context in args.contexts]
    results += [measure(args, 1, length, length) for length in args.prefills]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
