"""`compile_programs`: every program that a step may call, compiled before the first of them."""

import concurrent.futures
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from paged.kv_cache import KVCache
from paged.models.forward import split_head
from paged.models.lora import LoRAStack
from paged.models.packing import BatchLayout
from paged.models.programs import ProgramSource
from paged.models.scoring import Score, compile_score
from paged.models.step import (
    Forward,
    Greedy,
    Resize,
    Sample,
    compile_forward,
    compile_greedy,
    compile_resize,
    compile_sample,
)
from paged.scheduler.buckets import Bucket, BucketTable
from paged.scheduler.params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_PACKED_EDITS

# XLA compiles without the interpreter lock; more threads than this only add peak memory.
_COMPILE_THREADS = 2


@dataclass(frozen=True, slots=True)
class StepPrograms:
    """The compiled programs of an engine (`paged.models.step`).

    Attributes:
      forward: by bucket.
      resize: by (rows of the bucket, rows of the head).
      greedy, sample: by rows of the head.
      score: for the rows of prompts that are scored.
    """

    forward: dict[Bucket, Forward]
    resize: dict[tuple[int, int], Resize]
    greedy: dict[int, Greedy]
    sample: dict[int, Sample]
    score: Score


def step_layout(
    bucket: Bucket,
    *,
    max_blocks_per_seq: int,
    vocab_size: int,
    num_groups: int,
    has_loras: bool = False,
) -> BatchLayout:
    """Return the packed layout of a bucket."""
    return BatchLayout(
        num_tokens=bucket.num_tokens,
        num_seqs=bucket.num_seqs,
        max_blocks_per_seq=max_blocks_per_seq,
        max_logit_edits=MAX_PACKED_EDITS,
        vocab_size=vocab_size,
        num_groups=num_groups,
        max_logit_biases=MAX_LOGIT_BIASES,
        has_loras=has_loras,
    )


def compile_programs(
    table: BucketTable,
    layout_of: Callable[[Bucket], BatchLayout],
    graphdef: Any,
    params: Any,
    kv_cache: KVCache,
    *,
    max_num_seqs: int,
    store: ProgramSource,
    progress: bool,
    loras: LoRAStack | None = None,
) -> StepPrograms:
    """Compile all programs, several at once, or load them.

    Args:
      table: which shapes there are.
      layout_of: the packed layout of a bucket.
      graphdef, params: the split model.
      kv_cache: the cache, or its abstract shape.
      max_num_seqs: batch rows.
      store: makes or keeps compiled programs.
      progress: show a bar on standard error.
      loras: the model's adapters, if it has such.
    """
    head, head_params = split_head(graphdef, params)

    def layout(num_seqs: int) -> BatchLayout:
        return layout_of(Bucket(num_seqs, num_seqs))

    def forward(bucket: Bucket) -> Forward:
        wanted = layout_of(bucket)
        return compile_forward(
            store, graphdef, params, kv_cache, wanted, max_num_seqs=max_num_seqs, loras=loras
        )

    def resize(sizes: tuple[int, int]) -> Resize:
        return compile_resize(store, head, head_params, layout(sizes[0]), num_seqs=sizes[1])

    def greedy(size: int) -> Greedy:
        return compile_greedy(store, head, head_params, layout(size), max_num_seqs=max_num_seqs)

    def sample(size: int) -> Sample:
        return compile_sample(
            store,
            head,
            head_params,
            kv_cache,
            layout(size),
            max_num_seqs=max_num_seqs,
            max_logprobs=MAX_LOGPROBS,
        )

    def score(_: None) -> Score:
        vocab_size = layout(table.buckets[0].num_seqs).vocab_size
        return compile_score(
            store, head, head_params, vocab_size=vocab_size, max_logprobs=MAX_LOGPROBS
        )

    with concurrent.futures.ThreadPoolExecutor(_COMPILE_THREADS) as pool:

        def start[K, P](make: Callable[[K], P], keys: Any) -> dict[K, concurrent.futures.Future[P]]:
            # Threads know of a target that is not here (`backends.compiling_for`) by the context.
            return {key: pool.submit(copy_context().run, make, key) for key in keys}

        # The long compilations first, so that they do not end up alone at the end.
        started: tuple[dict[Any, concurrent.futures.Future[Any]], ...] = (
            start(forward, reversed(table.buckets)),
            start(resize, table.resizes),
            start(greedy, table.greedy_sizes),
            start(sample, table.sample_sizes),
            start(score, (None,)),
        )
        pending = [future for programs in started for future in programs.values()]
        with tqdm(
            total=len(pending), desc="Compiling", unit="program", disable=not progress
        ) as bar:
            for done in concurrent.futures.as_completed(pending):
                done.result()  # an error ends the wait at once
                bar.update()
    forwards, resizes, greedys, samples, scores = (
        {key: future.result() for key, future in programs.items()} for programs in started
    )
    return StepPrograms(forwards, resizes, greedys, samples, scores[None])
