"""`ModelRunner`: parameters, KV cache and the compiled programs of a step; nothing else."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paged.kv_cache import KVCache
from paged.models.batch import SampledTokens, WideEdits
from paged.models.executables import ExecutableStore
from paged.models.forward import split_head
from paged.models.lora_arrays import LoRAArrays
from paged.models.packing import BatchLayout
from paged.models.params_layout import ParamsLayout
from paged.models.programs import ProgramSource
from paged.models.sampling import mask_words
from paged.models.scoring import NUM_SCORED_ROWS
from paged.models.step import step_leaves
from paged.scheduler.batching import Batch, build_batch
from paged.scheduler.buckets import Bucket, BucketTable
from paged.scheduler.output import ModelRunnerOutput, RunnerLogprobs, SchedulerOutput
from paged.scheduler.prompt_pooling import PendingSums, pooled_tokens
from paged.scheduler.prompt_scoring import PendingScores, Scores, scored_rows
from paged.scheduler.row_table import RowTable
from paged.scheduler.step_programs import StepPrograms, compile_programs, step_layout
from paged.scheduler.structured.masked_step import MaskedStep
from paged.scheduler.wide_edits import fill_wide_edits


class BlockMover(Protocol):
    """Moves the contents of whole blocks; each call is dispatched and not waited for."""

    def save(self, kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Read blocks, given as (block id, key), before a later step overwrites them."""
        ...

    def restore(self, kv_cache: KVCache, contents: Sequence[object]) -> KVCache:
        """Return the cache, donated, with staged contents in their blocks."""
        ...

    def copy(self, kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> KVCache:
        """Return the cache, donated, with each (source, destination) block copied."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Samples that may still be in the making on the device.

    Attributes:
      token_ids: int32 `[at least num_scheduled]`; None of a step without sequences.
      num_scheduled: sequences of the step.
      logprobs: the samples with their log probabilities, if some sequence wants them.
      hidden: final hidden states, `[at least num_scheduled, hidden_size]`, if some sequence wants
        its own.
      scores: what is scored beside the samples, if something is.
      sums: what is added up of prompts, if something is.
    """

    token_ids: jax.Array | None
    num_scheduled: int
    logprobs: SampledTokens | None = None
    hidden: jax.Array | None = None
    scores: PendingScores | None = None
    sums: PendingSums | None = None

    def result(self) -> ModelRunnerOutput:
        """Return the sampled tokens, waiting for them if need be."""
        if self.token_ids is None:
            return ModelRunnerOutput(np.zeros(0, np.int32))
        rows = slice(0, self.num_scheduled)
        token_ids = np.asarray(self.token_ids)[rows]
        logprobs = None if self.logprobs is None else _to_host(self.logprobs, rows)
        hidden = None
        if self.hidden is not None:
            hidden = np.asarray(self.hidden)[rows].astype(np.float32)
        scores = Scores() if self.scores is None else self.scores.result()
        sums = {} if self.sums is None else self.sums.result()
        return ModelRunnerOutput(token_ids, logprobs, hidden, scores.prompts, scores.chosen, sums)


def _to_host(samples: SampledTokens, rows: slice) -> RunnerLogprobs:
    return RunnerLogprobs(
        sampled=np.asarray(samples.logprobs)[rows],
        ranks=np.asarray(samples.ranks)[rows],
        top_ids=np.asarray(samples.top_ids)[rows],
        top=np.asarray(samples.top_logprobs)[rows],
    )


class ModelRunner:
    """Runs scheduled steps on the device.

    Steps may be started before the results of earlier ones are read: they run in order, and a
    token that only the device knows is found there (docs/decisions/0016).

    Args:
      graphdef, params: the split model (`paged.models.forward`).
      kv_cache: owned from now on; every step donates and replaces it.
      max_num_seqs: batch rows, above every `Request.batch_row`.
      max_blocks_per_seq: width of the block tables.
      vocab_size: size of the logits.
      num_groups: cache groups of the model that `graphdef` was made for.
      block_mover: carries out what a step asks for beside the model; None if none ever does.
      params_layout: brings other parameters into the form of `params`; None if none ever come.
      loras: adapters on the device; None if requests have none.
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        vocab_size: int,
        num_groups: int = 1,
        block_mover: BlockMover | None = None,
        params_layout: ParamsLayout | None = None,
        loras: LoRAArrays | None = None,
    ) -> None:
        self._graphdef = graphdef
        self._params_layout = params_layout
        self._loras = loras
        self._use(params)
        self._kv_cache = kv_cache
        # Like the token ids of the cache, on every device that it is split over.
        everywhere = kv_cache.token_ids.sharding
        self._last_tokens = jnp.zeros(max_num_seqs, jnp.int32, device=everywhere)
        self._rows = RowTable(max_num_seqs, max_blocks_per_seq, num_groups)
        self._vocab_size = vocab_size
        self._no_edits: dict[int, WideEdits] = {}  # by rows of the head; nobody reads what is in it
        self._block_mover = block_mover
        self._is_host = jax.default_backend() == "cpu"
        self._table: BucketTable | None = None
        self._programs: StepPrograms | None = None

    def layout(self, bucket: Bucket) -> BatchLayout:
        """Return the packed layout of a bucket."""
        num_groups, _, max_blocks_per_seq = self._rows.block_tables.shape
        return step_layout(
            bucket,
            max_blocks_per_seq=max_blocks_per_seq,
            vocab_size=self._vocab_size,
            num_groups=num_groups,
            has_loras=self._loras is not None,
        )

    def _head_layout(self, num_rows: int) -> BatchLayout:
        """Return the layout of the programs that choose tokens for so many sequences."""
        return self.layout(Bucket(num_rows, num_rows))

    @property
    def programs(self) -> StepPrograms:
        """The compiled programs, for those who want to look into them.

        Raises:
          RuntimeError: before `warmup`.
        """
        if self._programs is None:
            raise RuntimeError("Call warmup(table) first: no step is compiled yet.")
        return self._programs

    def warmup(
        self, table: BucketTable, *, store: ProgramSource | None = None, progress: bool = True
    ) -> None:
        """Compile the programs of every bucket, or load them, and run the smallest once.

        Args:
          table: the buckets; `execute` picks from it.
          store: makes or keeps compiled programs; None: they are compiled and not kept.
          progress: show a bar on standard error.
        """
        self._programs = compile_programs(
            table,
            self.layout,
            self._graphdef,
            self._params,
            self._kv_cache,
            max_num_seqs=self._last_tokens.shape[0],
            store=store or ExecutableStore(None),
            progress=progress,
            loras=None if self._loras is None else self._loras.stack,
        )
        if self._loras is not None:
            self._loras.load(1, {})  # compiles what writes them
            self._use(self._params)
        self._table = table
        self._no_edits = {
            size: jax.tree.map(jnp.asarray, self._head_layout(size).empty_wide_edits())
            for size in table.sample_sizes
        }
        bucket = table.buckets[0]
        empty = self.layout(bucket).empty()
        for is_greedy in (False, True):
            batch = Batch(empty, is_greedy, wants_logprobs=False)
            self._choose(self._forward(bucket, batch, bucket.num_seqs), None)
        self._kv_cache.token_ids.block_until_ready()

    def execute(self, output: SchedulerOutput) -> DeviceStep | MaskedStep[DeviceStep]:
        """Start one step; the device may still work on it, and on earlier ones, when this returns.

        Where masks say which tokens some request may take, only the model is started, and the
        choice of tokens by `MaskedStep.choose`, before the next step.

        Raises:
          RuntimeError: before `warmup`, or after a failed step, which loses the donated cache; or
            if blocks have to move and nobody does it.
        """
        if self._table is None:
            raise RuntimeError("Call warmup(table) before execute(): no step is compiled yet.")
        self._move_blocks(output)
        self._load_adapters(output)
        num_seqs = len(output.scheduled)
        if not num_seqs:
            return DeviceStep(None, 0)
        bucket = self._table.pick(output.num_tokens, num_seqs)
        batch = build_batch(output, self.layout(bucket), self._rows, self._kv_cache.block_size)
        forward = self._forward(bucket, batch, num_seqs)
        beside = self._scores(output, forward), self._sums(output, forward)
        if not batch.uses_masks:
            return self._choose(forward, None, *beside)
        words = mask_words(self._vocab_size)
        return MaskedStep(forward.size, words, lambda masks: self._choose(forward, masks, *beside))

    def _scores(self, output: SchedulerOutput, forward: "_Forward") -> PendingScores | None:
        """Return what is scored beside the samples, None if nothing is."""
        may_score = output.scores_prompts or forward.batch.wants_logprobs
        rows = scored_rows(output) if may_score else []
        if not rows:
            return None
        assert self._programs is not None
        program, head_params = self._programs.score, self._head_params

        def score(hidden: np.ndarray, token_ids: np.ndarray, masks: np.ndarray) -> RunnerLogprobs:
            return _to_host(program(head_params, hidden, token_ids, masks), slice(None))

        words = mask_words(self._vocab_size)
        return PendingScores(rows, forward.all_hidden, score, NUM_SCORED_ROWS, words)

    def _sums(self, output: SchedulerOutput, forward: "_Forward") -> PendingSums | None:
        """Return what is added up of prompts, None if nothing is."""
        if not forward.batch.pools_prompts:
            return None
        return PendingSums(pooled_tokens(output), forward.all_hidden)

    def update_params(self, params: Any) -> None:
        """Compute with other parameters from the next step on; nothing is compiled.

        Args:
          params: see `ParamsLayout.arrange`. Arrays that lie where they should are used as they
            are: they must not be donated or deleted afterwards.

        Raises:
          ValueError: if they do not fit; those before are used on.
          RuntimeError: if the runner has no `params_layout`, or is closed.
        """
        if self._params_layout is None or not self._leaves:
            raise RuntimeError("Make the runner with a params_layout, and do not close it before.")
        self._use(self._params_layout.arrange(params))

    def _use(self, params: Any) -> None:
        self._params = params
        self._leaves, _ = step_leaves(params, None if self._loras is None else self._loras.stack)
        self._head_params = split_head(self._graphdef, params)[1]

    def close(self) -> None:
        """Release parameters, KV cache and compiled steps."""
        self._table = self._programs = None
        self._leaves = ()
        self._params = self._head_params = self._loras = None
        for array in jax.tree.leaves(self._kv_cache):
            if not array.is_deleted():
                array.delete()

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Do what `SchedulerOutput` wants done to whole blocks before the step, in its order."""
        if not (output.saves or output.restores or output.block_copies):
            return
        mover = self._block_mover
        if mover is None:
            raise RuntimeError("The step moves blocks; make the runner with a block_mover.")
        # Rebound at once: the donated arrays are gone.
        if output.restores:
            self._kv_cache = mover.restore(self._kv_cache, output.restores)
        if output.saves:
            mover.save(self._kv_cache, output.saves)
        if output.block_copies:
            self._kv_cache = mover.copy(self._kv_cache, output.block_copies)

    def _load_adapters(self, output: SchedulerOutput) -> None:
        """Put the adapters that a step needs, and that were elsewhere, into their slots."""
        if not output.lora_loads:
            return
        assert self._loras is not None, "make the runner with loras"
        for slot, adapter in output.lora_loads:
            self._loras.load(slot, adapter.weights.layers)
        self._use(self._params)

    def _forward(self, bucket: Bucket, batch: Batch, num_seqs: int) -> "_Forward":
        """Start the model's part of a step."""
        programs, table = self._programs, self._table
        assert programs is not None
        assert table is not None
        # Rebound at once: the donated arrays are gone.
        hidden, rows, self._kv_cache, all_hidden = programs.forward[bucket](
            self._leaves, self._kv_cache, batch.packed, self._last_tokens
        )
        size = table.pick_head(bucket, num_seqs, is_greedy=batch.is_greedy)
        if size != bucket.num_seqs:
            hidden, rows = programs.resize[bucket.num_seqs, size](hidden, rows)
        return _Forward(hidden, rows, all_hidden, size, batch, num_seqs)

    def _choose(
        self,
        forward: "_Forward",
        masks: np.ndarray | None,
        scores: PendingScores | None = None,
        sums: PendingSums | None = None,
    ) -> DeviceStep:
        """Start the choice of the tokens of the step whose model part was started last."""
        programs = self._programs
        assert programs is not None
        hidden, rows, _, size, batch, num_seqs = forward
        samples: SampledTokens | None = None
        if batch.is_greedy:
            token_ids, self._last_tokens = programs.greedy[size](
                self._head_params, hidden, rows, self._last_tokens
            )
        else:
            wide = self._no_edits[size]
            allowed = wide.allowed if masks is None else masks
            if batch.wide_edits:
                wide = fill_wide_edits(batch.wide_edits, self._head_layout(size))
            cached = self._kv_cache.token_ids
            samples, self._last_tokens = programs.sample[size](
                self._head_params, hidden, rows, cached, self._last_tokens, allowed, wide
            )
            token_ids = samples.token_ids
        logprobs = samples if batch.wants_logprobs else None
        wanted = hidden if batch.wants_hidden else None
        if not self._is_host:
            # Queued behind the step, so that the tokens are here when somebody asks.
            for array in jax.tree.leaves((token_ids, logprobs, wanted)):
                array.copy_to_host_async()
        if scores is not None and masks is not None:
            scores = dataclasses.replace(scores, masks=masks)
        return DeviceStep(token_ids, num_seqs, logprobs, wanted, scores, sums)


class _Forward(NamedTuple):
    """A step of which the model's part has been started.

    Attributes:
      hidden, rows: as `forward_step` returns them, for `size` sequences.
      all_hidden: of all tokens, as it returns them.
      size: rows of the head.
      batch: what went in.
      num_seqs: sequences of the step.
    """

    hidden: jax.Array
    rows: jax.Array
    all_hidden: jax.Array
    size: int
    batch: Batch
    num_seqs: int
