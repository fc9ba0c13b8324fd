"""Microseconds of CPU per block of the block pool, by eviction policy.

    python -m benchmarks.block_pool [--blocks 100000] [--policies lru,auto]

The pool is full of cached content; each round admits a request that misses: `lookup` is told,
blocks are allocated (each evicts one), registered with their parents and freed. Column `alone`
allocates and frees without content. The best of several rounds: whatever else the machine does can
only add. With a larger pool the figures should stay, or some operation is not constant in time.
"""

import argparse
import itertools
import time
from collections.abc import Callable

from tqdm import tqdm

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.eviction.policies import POLICIES, make_policy

BLOCK_SIZE = 16
REQUEST_BLOCKS = 2000
CALLS = ("alone", "lookup", "allocate", "register", "free", "hit")


class Timer:
    """Best time per block by kind of call."""

    def __init__(self) -> None:
        self.best = dict.fromkeys(CALLS, float("inf"))

    def __call__[Result](self, call: str, function: Callable[..., Result], *args: object) -> Result:
        start = time.process_time()
        result = function(*args)
        seconds = time.process_time() - start
        self.best[call] = min(self.best[call], 1e6 * seconds / REQUEST_BLOCKS)
        return result


def measure(policy: str, num_blocks: int, rounds: int) -> dict[str, float]:
    """Microseconds per block of each kind of call."""
    pool = BlockPool(num_blocks + 1, BLOCK_SIZE, policy=make_policy(policy))
    timer = Timer()
    for _ in range(rounds):
        pool.free(reversed(timer("alone", pool.allocate, REQUEST_BLOCKS)))

    def register(table: list[int], keys: list[bytes]) -> None:
        parent = NULL_BLOCK
        for block_id, key in zip(table, keys, strict=True):
            pool.register(block_id, key, parent)
            parent = block_id

    numbers = itertools.count()
    for number in range(num_blocks // REQUEST_BLOCKS + rounds):
        if number == num_blocks // REQUEST_BLOCKS:
            timer.best |= dict.fromkeys(CALLS[1:], float("inf"))
        keys = [f"{next(numbers):032}".encode() for _ in range(REQUEST_BLOCKS)]
        pool.policy.expect(number, keys)
        pool.policy.forget(number)
        timer("lookup", pool.policy.lookup, keys, 0)
        table = timer("allocate", pool.allocate, REQUEST_BLOCKS)
        timer("register", register, table, keys)
        timer("free", pool.free, table[::-1])
        timer("hit", pool.touch, table)
        pool.free(table[::-1])
    return timer.best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    rows = {
        name: measure(name, args.blocks, args.rounds)
        for name in tqdm(args.policies.split(","), unit="policy")
    }
    print("| policy |", " | ".join(CALLS), "| miss in all |")
    print("|---" * (len(CALLS) + 2) + "|")
    for name, best in rows.items():
        whole = sum(best[call] for call in ("lookup", "allocate", "register", "free"))
        cells = " | ".join(f"{best[call]:.2f}" for call in CALLS)
        print(f"| {name} | {cells} | {whole:.2f} |")


if __name__ == "__main__":
    main()
