"""`ModelRunner`: parameters, KV cache and one compiled step per bucket; nothing else."""

import concurrent.futures
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from paged.kv_cache import KVCache
from paged.models.batch import SampledTokens
from paged.models.packing import BatchLayout
from paged.models.step import Forward, Sample, compile_forward, compile_sample
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
        self._forward: dict[Bucket, Forward] = {}
        self._sample: dict[int, Sample] = {}  # by number of sequences

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
        """Compile the programs of every bucket, and run the smallest once.

        Args:
          table: the buckets; `execute` picks from it.
          progress: show a bar on standard error.
        """
        # Largest first, so that the long compilations do not end up alone at the end.
        buckets = sorted(table.buckets, key=lambda b: b.num_tokens * b.num_seqs, reverse=True)
        by_num_seqs = {bucket.num_seqs: bucket for bucket in buckets}
        with (
            concurrent.futures.ThreadPoolExecutor(_COMPILE_THREADS) as pool,
            tqdm(
                total=len(buckets) + len(by_num_seqs),
                desc="Compiling",
                unit="program",
                disable=not progress,
            ) as bar,
        ):
            forward = {b: pool.submit(self._compile_forward, b) for b in buckets}
            sample = {n: pool.submit(self._compile_sample, b) for n, b in by_num_seqs.items()}
            pending: list[concurrent.futures.Future[Any]]
            pending = [*forward.values(), *sample.values()]
            for done in concurrent.futures.as_completed(pending):
                done.result()  # an error ends the wait at once
                bar.update()
        self._forward = {bucket: future.result() for bucket, future in forward.items()}
        self._sample = {num_seqs: future.result() for num_seqs, future in sample.items()}
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
        self._forward.clear()
        self._sample.clear()
        self._leaves = ()
        self._params = None
        for array in jax.tree.leaves(self._kv_cache):
            if not array.is_deleted():
                array.delete()

    def _compile_forward(self, bucket: Bucket) -> Forward:
        return compile_forward(self._graphdef, self._params, self._kv_cache, self.layout(bucket))

    def _compile_sample(self, bucket: Bucket) -> Sample:
        return compile_sample(self._kv_cache, self.layout(bucket), max_logprobs=MAX_LOGPROBS)

    def _run(self, bucket: Bucket, packed: np.ndarray) -> SampledTokens:
        # Rebound at once: the donated arrays are gone.
        logits, rows, self._kv_cache = self._forward[bucket](self._leaves, self._kv_cache, packed)
        return self._sample[bucket.num_seqs](logits, rows, self._kv_cache.token_ids)
