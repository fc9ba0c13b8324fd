"""Microseconds of the host's share of a step: schedule, build the batch, update; no device.

    python benchmarks/host_step.py

Medians over many steps. Decodes cross a block boundary in different steps, as they do when
requests arrive at different times. The mixed step is 63 decodes and a chunk of a long prompt.
"""

import argparse
import time

import numpy as np

from paged.models.packing import BatchLayout
from paged.scheduler.batching import build_batch
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.buckets import BucketTable
from paged.scheduler.output import ModelRunnerOutput
from paged.scheduler.params import MAX_LOGIT_EDITS, SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.row_table import RowTable
from paged.scheduler.scheduler import Scheduler

BLOCK_SIZE, VOCAB_SIZE = 16, 49152
CHUNK_TOKENS = 512


def make_request(index: int, num_tokens: int) -> Request:
    prompt = tuple(range(index * 1000, index * 1000 + num_tokens))
    return Request(f"r{index}", prompt, SamplingParams(), max_tokens=10**9, seed=index)


def measure(num_seqs: int, *, mixed: bool, num_steps: int, max_model_len: int) -> np.ndarray:
    """Return microseconds (schedule, build, update) of each step, `[num_steps, 3]`."""
    num_decodes = num_seqs - mixed
    budget = num_decodes + CHUNK_TOKENS if mixed else 128 * num_seqs
    blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
    scheduler = Scheduler(
        pool=BlockPool(num_seqs * blocks_per_seq + 1, BLOCK_SIZE),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
    )
    buckets = BucketTable(num_seqs, budget)
    table = RowTable(num_seqs, blocks_per_seq)
    for index in range(num_decodes):
        scheduler.add(make_request(index, 100 + index % BLOCK_SIZE))
    times = []
    next_index = num_seqs
    while len(times) < num_steps:
        is_steady = not scheduler.num_waiting
        if mixed and is_steady and scheduler.num_running == num_decodes:
            next_index += 1
            scheduler.add(make_request(next_index, CHUNK_TOKENS))
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        bucket = buckets.pick(output.num_tokens, len(output.scheduled))
        layout = BatchLayout(
            bucket.num_tokens, bucket.num_seqs, blocks_per_seq, MAX_LOGIT_EDITS, VOCAB_SIZE
        )
        build_batch(output, layout, table, BLOCK_SIZE)
        built = time.perf_counter()
        tokens = np.full(len(output.scheduled), 7, np.int32)
        scheduler.update(output, ModelRunnerOutput(tokens))
        updated = time.perf_counter()
        if is_steady:
            times.append((scheduled - started, built - scheduled, updated - built))
        scheduler.abort([f"r{next_index}"])
    return np.array(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--max-model-len", type=int, default=2048)
    args = parser.parse_args()
    for num_seqs, mixed in ((16, False), (64, False), (256, False), (64, True)):
        times = measure(
            num_seqs, mixed=mixed, num_steps=args.num_steps, max_model_len=args.max_model_len
        )
        parts = np.median(times, axis=0)
        name = f"{num_seqs - mixed} decodes" + (f" + {CHUNK_TOKENS} prompt tokens" if mixed else "")
        print(
            f"{name}: schedule {parts[0]:.0f}, build {parts[1]:.0f}, update {parts[2]:.0f}, "
            f"together {np.median(times.sum(axis=1)):.0f} us",
            flush=True,
        )


if __name__ == "__main__":
    main()
