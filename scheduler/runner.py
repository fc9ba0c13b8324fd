"""`ModelRunner`: parameters, KV cache and one compiled step per bucket; nothing else."""

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from paged.kv_cache import KVCache
from paged.models.batch import SampledTokens
from paged.models.packing import BatchLayout
from paged.models.step import Step, compile_step
from paged.scheduler.batching import build_batch
from paged.scheduler.buckets import Bucket, BucketTable
from paged.scheduler.output import ModelRunnerOutput, RunnerLogprobs, SchedulerOutput
from paged.scheduler.params import MAX_LOGIT_EDITS, MAX_LOGPROBS

# XLA compiles without the interpreter lock; more threads than this only add peak memory.
_COMPILE_THREADS = 2


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Samples that may still be in the making on the device."""

    samples: SampledTokens
    num_scheduled: int
    wants_logprobs: bool

    def result(self) -> ModelRunnerOutput:
        """Return the sampled tokens, waiting for them if need be."""
        rows = slice(0, self.num_scheduled)
        token_ids = np.asarray(self.samples.token_ids)[rows]
        if not self.wants_logprobs:
            return ModelRunnerOutput(token_ids)
        logprobs = RunnerLogprobs(
            sampled=np.asarray(self.samples.logprobs)[rows],
            ranks=np.asarray(self.samples.ranks)[rows],
            top_ids=np.asarray(self.samples.top_ids)[rows],
            top=np.asarray(self.samples.top_logprobs)[rows],
        )
        return ModelRunnerOutput(token_ids, logprobs)


class ModelRunner:
    """Runs scheduled steps on the device.

    Args:
      graphdef, params: the split model (`paged.models.forward`).
      kv_cache: owned from now on; every step donates and replaces it.
      max_blocks_per_seq: width of the block tables.
      vocab_size: size of the logits.
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        kv_cache: KVCache,
        *,
        max_blocks_per_seq: int,
        vocab_size: int,
    ) -> None:
        self._graphdef = graphdef
        self._params = params
        self._leaves = tuple(jax.tree.leaves(params))
        self._kv_cache = kv_cache
        self._max_blocks_per_seq = max_blocks_per_seq
        self._vocab_size = vocab_size
        self._table: BucketTable | None = None
        self._steps: dict[Bucket, Step] = {}

    def layout(self, bucket: Bucket) -> BatchLayout:
        """Return the packed layout of a bucket."""
        return BatchLayout(
            num_tokens=bucket.num_tokens,
            num_seqs=bucket.num_seqs,
            max_blocks_per_seq=self._max_blocks_per_seq,
            max_logit_edits=MAX_LOGIT_EDITS,
            vocab_size=self._vocab_size,
        )

    def warmup(self, table: BucketTable, *, progress: bool = True) -> None:
        """Compile the step of every bucket, and run the smallest once.

        Args:
          table: the buckets; `execute` picks from it.
          progress: show a bar on standard error.
        """

        def compile_one(bucket: Bucket) -> tuple[Bucket, Step]:
            layout = self.layout(bucket)
            return bucket, compile_step(
                self._graphdef,
                self._params,
                self._kv_cache,
                layout,
                max_logprobs=MAX_LOGPROBS,
            )

        with (
            concurrent.futures.ThreadPoolExecutor(_COMPILE_THREADS) as pool,
            tqdm(
                total=len(table.buckets),
                desc="Compiling steps",
                unit="shape",
                disable=not progress,
            ) as bar,
        ):
            # Largest first, so that the long compilations do not end up alone at the end.
            for bucket, step in pool.map(compile_one, _largest_first(table.buckets)):
                self._steps[bucket] = step
                bar.update()
        self._table = table
        self._run(table.buckets[0], self.layout(table.buckets[0]).empty())
        self._kv_cache.token_ids.block_until_ready()

    def execute(self, output: SchedulerOutput) -> DeviceStep:
        """Start one step; the device may still work on it when this returns.

        Raises:
          RuntimeError: before `warmup`, or after a failed step, which loses the donated cache.
        """
        if self._table is None:
            raise RuntimeError("Call warmup(table) before execute(): no step is compiled yet.")
        bucket = self._table.pick(output.num_tokens, len(output.scheduled))
        packed = build_batch(output, self.layout(bucket), self._kv_cache.block_size)
        samples = self._run(bucket, packed)
        wants_logprobs = any(
            s.samples and s.request.params.logprobs is not None for s in output.scheduled
        )
        return DeviceStep(samples, len(output.scheduled), wants_logprobs)

    def close(self) -> None:
        """Release parameters, KV cache and compiled steps."""
        self._table = None
        self._steps.clear()
        self._leaves = ()
        self._params = None
        for array in jax.tree.leaves(self._kv_cache):
            if not array.is_deleted():
                array.delete()

    def _run(self, bucket: Bucket, packed: np.ndarray) -> SampledTokens:
        # Rebound at once: the donated arrays are gone.
        samples, self._kv_cache = self._steps[bucket](self._leaves, self._kv_cache, packed)
        return samples


def _largest_first(buckets: Sequence[Bucket]) -> list[Bucket]:
    return sorted(buckets, key=lambda b: b.num_tokens * b.num_seqs, reverse=True)
