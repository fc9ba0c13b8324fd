"""Time of linear layers by number of rows: native kernels in bfloat16 and int8, and XLA.

python benchmarks/linear.py --rows 1 8 64

The layers, 576 to 3072 features and back, follow one another, each on the output of the one before,
and have more weights than any cache holds. Variants take turns; the best of their times counts.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged.native.library import load_library
from paged.native.linear import PackedWeight, pack, packed_linear
from paged.scheduler.config import DEFAULT_NATIVE_CACHE_DIR

SHAPES = ((3072, 576), (576, 3072))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 32, 64, 256])
    parser.add_argument("--mb", type=int, default=320, help="weights in MB, bfloat16")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each variant")
    parser.add_argument("--level", type=int, default=-1, help="instruction set; -1: the best")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    args = parser.parse_args()
    if reason := load_library(DEFAULT_NATIVE_CACHE_DIR, progress=True):
        parser.error(f"no native kernels: {reason}")
    pairs = args.mb * 10**6 // (2 * sum(n * k for n, k in SHAPES))
    print("rows  " + "".join(f"{name:>28}" for name in args.variants))
    for rows in args.rows:
        line = f"{rows:4}  "
        calls = [VARIANTS[name](pairs, rows, args.level) for name in args.variants]
        best = [float("inf")] * len(calls)
        for _ in range(args.runs + 1):
            for i, (call, _) in enumerate(calls):
                started = time.perf_counter()
                call().block_until_ready()
                best[i] = min(best[i], time.perf_counter() - started)
        flops = 2 * rows * pairs * sum(n * k for n, k in SHAPES)
        for seconds, (_, num_bytes) in zip(best, calls, strict=True):
            line += f"{num_bytes / seconds / 1e9:14.1f} GB/s{flops / seconds / 1e9:6.0f} GF/s"
        print(line, flush=True)


def _weights(pairs: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    # Copies are other memory with the same numbers.
    once = [rng.standard_normal(shape).astype(np.float32) / shape[1] ** 0.5 for shape in SHAPES]
    return once * pairs


type Variant = tuple[Callable[[], Array], int]


def _native(pairs: int, rows: int, level: int, *, is_int8: bool) -> Variant:
    packed = []
    for weight in _weights(pairs):
        values = np.asarray(jnp.asarray(weight, "bfloat16"))
        scales = None
        if is_int8:
            scales = jnp.asarray(np.abs(weight).max(axis=1) / 127)
            values = np.rint(weight / np.asarray(scales)[:, None]).astype(np.int8)
        packed.append((jnp.array(pack(values)), scales))

    @jax.jit
    def run(x: Array, packed: list[tuple[Array, Array | None]]) -> Array:
        for i, (words, scales) in enumerate(packed):
            weight = PackedWeight(words, SHAPES[i % 2][0], scales)
            (x,) = packed_linear(x, [weight], level=level)
        return x

    x = jnp.ones((rows, SHAPES[0][1]), "bfloat16")
    return lambda: run(x, packed), sum(words.nbytes for words, _ in packed)


def _xla(pairs: int, rows: int, level: int) -> Variant:
    del level
    weights = [jnp.asarray(weight, "bfloat16") for weight in _weights(pairs)]

    @jax.jit
    def run(x: Array, weights: list[Array]) -> Array:
        for weight in weights:
            x = jnp.einsum("TD,FD->TF", x, weight)
        return x

    x = jnp.ones((rows, SHAPES[0][1]), "bfloat16")
    return lambda: run(x, weights), sum(weight.nbytes for weight in weights)


VARIANTS: dict[str, Callable[[int, int, int], Variant]] = {
    "native": lambda *args: _native(*args, is_int8=False),
    "int8": lambda *args: _native(*args, is_int8=True),
    "xla": _xla,
}

if __name__ == "__main__":
    main()
