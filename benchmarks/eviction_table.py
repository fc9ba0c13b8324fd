"""Prefix-cache hits by eviction policy and trace, in percent of all full prompt blocks.

    python -m benchmarks.eviction_table [--seeds 5] [--policies lru,auto]

Whole requests pass one after the other through the real `BlockPool`: hits are referenced, the rest
allocated, full blocks registered, all released tail first. No model, no scheduler. A request's
content is the keys of its full blocks; it also holds one partial block.
"""

import argparse
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tqdm import tqdm

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.eviction.policies import POLICIES, make_policy

NUM_BLOCKS = 1345
BLOCK_SIZE = 16
DOCUMENT_BLOCKS = 5033 // BLOCK_SIZE
NUM_REQUESTS = 200
QUEUE = 8


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Keys of a prompt's full blocks, and of the blocks that its output completes."""

    keys: tuple[bytes, ...]
    output_keys: tuple[bytes, ...] = ()


def chain(name: object, start: int, stop: int) -> tuple[bytes, ...]:
    """Keys of the blocks `start` to `stop` of one text."""
    return tuple(f"{name}:{index}".encode() for index in range(start, stop))


def document(number: object, num_blocks: int = DOCUMENT_BLOCKS) -> TraceRequest:
    return TraceRequest(chain(number, 0, num_blocks))


def passes(orders: str, documents: int = 10) -> Iterator[TraceRequest]:
    """All documents once per letter: f forward, r reverse."""
    for order in orders:
        numbers = range(documents)
        yield from map(document, numbers if order == "f" else reversed(numbers))


def cyclic(seed: int) -> Iterator[TraceRequest]:
    """Ten documents in a loop."""
    return passes("f" * (NUM_REQUESTS // 10))


def sawtooth(seed: int) -> Iterator[TraceRequest]:
    """Ten documents forward and back."""
    return passes("fr" * (NUM_REQUESTS // 20))


def zipf(seed: int) -> Iterator[TraceRequest]:
    """40 documents, the n-th drawn with weight 1/n."""
    weights = [1 / rank for rank in range(1, 41)]
    return map(document, random.Random(seed).choices(range(40), weights, k=NUM_REQUESTS))


def hot_and_scan(seed: int) -> Iterator[TraceRequest]:
    """Every other request asks for one of two hot documents, the others come once."""
    draw = random.Random(seed)
    for number in range(NUM_REQUESTS):
        yield document(draw.randrange(2) if draw.random() < 0.5 else f"once{number}")


def working_set(seed: int) -> Iterator[TraceRequest]:
    """Four documents at random, replaced by four others after every 50 requests."""
    draw = random.Random(seed)
    for number in range(NUM_REQUESTS):
        yield document((number // 50, draw.randrange(4)))


def chat(seed: int) -> Iterator[TraceRequest]:
    """Twelve conversations at a time behind one system prompt; each turn adds to its history."""
    draw = random.Random(seed)
    system = chain("system", 0, 30)
    ids = itertools.count()
    live = [(next(ids), [0]) for _ in range(12)]
    for _ in range(NUM_REQUESTS):
        slot = draw.randrange(len(live))
        number, length = live[slot]
        question, answer = draw.randint(2, 20), draw.randint(5, 40)
        prompt = chain(("chat", number), 0, length[0] + question)
        length[0] += question + answer
        yield TraceRequest(system + prompt, chain(("chat", number), len(prompt), length[0]))
        if draw.random() < 0.12:
            live[slot] = (next(ids), [0])


def agent_tree(seed: int) -> Iterator[TraceRequest]:
    """Tasks behind shared tools; each step goes on from a recent node of its task's tree."""
    draw = random.Random(seed)
    tools = chain("tools", 0, 60)
    tasks: list[list[tuple[bytes, ...]]] = []
    for number in range(NUM_REQUESTS):
        if not tasks or draw.random() < 0.06:
            tasks.append([tools + chain(("task", number), 0, draw.randint(10, 60))])
        nodes = draw.choice(tasks[-4:])
        # Mostly the newest branch, sometimes back to an older node: a retry.
        node = nodes[-1] if draw.random() < 0.7 else draw.choice(nodes)
        step = chain(("step", number), 0, draw.randint(4, 30))
        output = chain(("out", number), 0, draw.randint(2, 12))
        nodes.append(node + step + output)
        yield TraceRequest(node + step, output)


TRACES: dict[str, Callable[[int], Iterator[TraceRequest]]] = {
    "cyclic": cyclic,
    "sawtooth": sawtooth,
    "zipf": zipf,
    "hot + scan": hot_and_scan,
    "working set": working_set,
    "chat": chat,
    "agent tree": agent_tree,
}


def play(pool: BlockPool, trace: Iterator[TraceRequest], queue: int = QUEUE) -> Iterator[int]:
    """Pass requests through the pool one at a time; yield how many blocks each one hit.

    The policy is told of the `queue` requests behind the one that runs.
    """
    numbered = enumerate(trace)
    waiting: deque[tuple[int, TraceRequest]] = deque()

    def fill(length: int) -> None:
        for number, request in itertools.islice(numbered, max(0, length - len(waiting))):
            waiting.append((number, request))
            pool.policy.expect(number, request.keys)

    fill(1)
    while waiting:
        number, request = waiting.popleft()
        pool.policy.forget(number)
        fill(queue)
        yield _run(pool, request)
        fill(1)


def _run(pool: BlockPool, request: TraceRequest) -> int:
    """One request from admission to release."""
    keys = request.keys + request.output_keys
    hits: list[int] = []
    for key in request.keys:
        block_id = pool.lookup(key)
        if block_id is None:
            break
        hits.append(block_id)
    pool.touch(hits)
    pool.policy.lookup(request.keys, len(hits))
    table = hits + pool.allocate(len(keys) + 1 - len(hits))
    for index in range(len(hits), len(keys)):
        pool.register(table[index], keys[index], table[index - 1] if index else NULL_BLOCK)
    pool.free(reversed(table))
    return len(hits)


def hit_blocks(policy: str, trace: Iterator[TraceRequest], queue: int = QUEUE) -> int:
    """Sum of the hits of one trace in a new pool."""
    return sum(play(BlockPool(NUM_BLOCKS, BLOCK_SIZE, policy=make_policy(policy)), trace, queue))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    names = args.policies.split(",")
    rows = list(itertools.product(TRACES, names, range(args.seeds)))
    hits = {row: hit_blocks(row[1], TRACES[row[0]](row[2])) for row in tqdm(rows, unit="trace")}
    print("| trace |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for trace, make in TRACES.items():
        blocks = [sum(len(request.keys) for request in make(seed)) for seed in range(args.seeds)]
        shares = [
            sum(100 * hits[trace, name, seed] / total for seed, total in enumerate(blocks))
            / args.seeds
            for name in names
        ]
        print(f"| {trace} |", " | ".join(f"{share:.1f}" for share in shares), "|")


if __name__ == "__main__":
    main()
