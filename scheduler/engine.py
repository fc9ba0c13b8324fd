"""`Engine`: the synchronous core that joins scheduler, runner and output processor."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paged.models.tokenizer import Tokenizer
from paged.scheduler.admission import InputProcessor
from paged.scheduler.deltas import Delta, join
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.lora_store import Adapter, LoRAStore
from paged.scheduler.output import (
    DeviceWork,
    FinishReason,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
    StepStats,
)
from paged.scheduler.output_processor import OutputProcessor
from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.prompt_pooling import keep_pooled
from paged.scheduler.request import CacheMode, Request
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.snapshot import EngineSnapshot, take_snapshot
from paged.scheduler.stats import StatsBuilder
from paged.scheduler.structured.compiler import Grammar, GrammarCompiler
from paged.scheduler.structured.grammar_constraint import MaskFiller
from paged.scheduler.structured.masked_step import MaskedStep
from paged.scheduler.tiers.figures import TierStats
from paged.scheduler.work import time_work

# How long an engine with nothing else to do waits for a load before it looks for new requests.
_TIER_WAIT_SECONDS = 0.005


class PendingStep(Protocol):
    """A step on its way; `result` waits for the device."""

    def result(self) -> ModelRunnerOutput:
        """Return the sampled tokens, waiting for them if need be."""
        ...


class Runner(Protocol):
    """What the engine needs of a runner; tests hand in one without a model."""

    def execute(self, output: SchedulerOutput) -> PendingStep | MaskedStep[PendingStep]:
        """Start the step, or what can be started before its masks are known."""
        ...

    def update_params(self, params: Any) -> None:
        """Compute with other parameters from the next step on; raises ValueError if they differ."""
        ...

    def close(self) -> None:
        """Release the device's memory."""
        ...


class WaitableTiers(Protocol):
    """What the engine needs of the tiers."""

    def wait(self, timeout: float) -> bool:
        """Return when some load has finished, or after so many seconds."""
        ...

    def stats(self) -> TierStats:
        """Return figures; any thread may ask."""
        ...

    def close(self) -> None:
        """Release memory, files and threads."""
        ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step."""

    scheduled: SchedulerOutput
    pending: PendingStep


class Engine:
    """Adds requests, runs steps, returns what each step produced.

    Not thread-safe: one thread owns it (`AsyncEngine` does so for a server).

    Args:
      scheduler: policy over the block pool.
      runner: runs scheduled steps; owned, closed by `close`.
      tokenizer: of the model.
      processor: checks and expands user requests.
      async_scheduling: plan and dispatch each step while the device still works on the one
        before; outputs then come one call of `step` later, and are the same.
      grammars: compiles what structured outputs ask for; None: they are refused. Owned.
      loras: adapters that requests may name; None: they are refused.
      tiers: the scheduler's memory below the device, to wait for; owned, closed by `close`.
      estimate_work: what each device does in a step, for metrics; None: not reported.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        processor: InputProcessor,
        async_scheduling: bool = False,
        grammars: GrammarCompiler | None = None,
        loras: LoRAStore | None = None,
        tiers: WaitableTiers | None = None,
        estimate_work: Callable[[SchedulerOutput], DeviceWork] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.processor = processor
        self.runner = runner
        self._clock = clock
        self._stats = StatsBuilder(estimate_work)
        self._outputs = OutputProcessor(
            tokenizer,
            finish=scheduler.finish,
            on_end=lambda request: self._stats.on_finished(request, self._clock()),
        )
        self._async_scheduling = async_scheduling
        self.grammars = grammars
        self.loras = loras
        self._mask_filler = MaskFiller()
        self._tiers = tiers
        self._in_flight: _InFlight | None = None
        self._early_deltas: list[Delta] = []
        self._measures_work = False

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self._outputs or self._early_deltas) or self._in_flight is not None

    @property
    def num_unfinished(self) -> int:
        """Samples that are waiting or running."""
        return len(self._outputs)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
        cache_mode: CacheMode = CacheMode.DEFAULT,
        priority: int = 0,
        lora: LoRARequest | None = None,
        stream: bool = True,
    ) -> None:
        """Check a user request and queue its samples.

        Args:
          request_id: unique among unfinished requests.
          prompt_token_ids: ids of the prompt.
          params: sampling parameters.
          prompt: the prompt's text, handed back in the outputs.
          cache_salt, cache_mode, priority: as in `InputProcessor.process`.
          lora: adapter to compute with, which is read if it is not in memory.
          stream: as in `add_processed`.

        Raises:
          ParameterError: for what cannot be served (see `InputProcessor.process`), or a grammar
            that cannot be compiled, which is waited for.
          QueueFullError: if too many grammars wait.
          AdapterError: if the adapter cannot be used.
          ValueError: if the id belongs to an unfinished request.
        """
        requests = self.processor.process(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            cache_mode=cache_mode,
            priority=priority,
            grammar=self._compile(params),
            adapter=None if lora is None else self.lora_store(lora).get(lora),
        )
        self.add_processed(requests, prompt, stream=stream)

    def _compile(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a request, if it has one, waiting for it."""
        compiler = self._compiler_for(params)
        if compiler is None or params.structured_outputs is None:
            return None
        return compiler.compile(params.structured_outputs)

    async def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """Return what `InputProcessor.process` needs for structured outputs, None if for nothing.

        May be called by any thread; the engine does not wait.

        Raises: as `GrammarCompiler.compile`.
        """
        compiler = self._compiler_for(params)
        if compiler is None or params.structured_outputs is None:
            return None
        return await compiler.compile_async(params.structured_outputs)

    def lora_store(self, lora: LoRARequest) -> LoRAStore:
        """Return what has the adapter, or reads it.

        Raises:
          ParameterError: if requests may name no adapters.
        """
        if self.loras is None:
            raise ParameterError(
                "lora", lora.lora_name, "needs an engine with enable_lora (--enable-lora)"
            )
        return self.loras

    async def load_adapter(self, lora: LoRARequest | None) -> Adapter | None:
        """Return what `InputProcessor.process` needs for an adapter; any thread may call it.

        Raises:
          ParameterError, AdapterError: as `add_request`.
        """
        return None if lora is None else await self.lora_store(lora).get_async(lora)

    def prepare_grammars(self) -> None:
        """Wait for what the first grammar needs, which would hold up everybody else later."""
        if self.grammars is not None:
            self.grammars.wait_until_loaded()

    def _compiler_for(self, params: SamplingParams) -> GrammarCompiler | None:
        if params.structured_outputs is not None and self.grammars is None:
            raise ParameterError(
                "structured_outputs", params.structured_outputs, "needs an engine with grammars"
            )
        return self.grammars

    def add_processed(
        self, requests: Sequence[Request], prompt: str | None = None, *, stream: bool = True
    ) -> None:
        """Queue the samples of one user request that `processor` has already checked.

        Args:
          requests: the samples.
          prompt: the prompt's text, handed back in the outputs.
          stream: return new tokens with every step; otherwise each sample has one output, all of
            it when it ends, which costs less.

        Raises:
          ValueError: if an id belongs to an unfinished request; nothing is queued then.
          CapacityError: if the prompt can never fit into the pool.
        """
        self._outputs.check_ids(requests)
        self.scheduler.check_fits(requests[0].num_prompt_tokens + 1)
        self._outputs.add(requests, prompt, stream=stream)
        for request in requests:
            # The samples of one prompt have the same blocks: they are hashed once.
            request.block_hashes = list(requests[0].block_hashes)
            self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End user requests by id and free their blocks; unknown ids are ignored.

        Returns:
          One last output per aborted sample, with finish reason "abort".
        """
        return [join([delta]) for delta in self.abort_deltas(request_ids)]

    def abort_deltas(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[Delta]:
        """Do what `abort` does; for callers that join deltas themselves, or have another reason."""
        deltas = []
        for parent_id in request_ids:
            for request in self._outputs.unfinished(parent_id):
                self.scheduler.finish(request, reason)
            deltas += self._outputs.abort(parent_id)
        return deltas

    def step(self) -> tuple[list[RequestOutput], StepStats]:
        """Run one step: schedule, execute, update.

        Returns:
          One output per sample that advanced and streams, or has ended; and what the step did.
        """
        deltas, stats = self.step_deltas()
        return [join([delta]) for delta in deltas], stats

    def step_deltas(self) -> tuple[list[Delta], StepStats]:
        """Do what `step` does; for callers that join deltas themselves, several steps at once.

        With asynchronous scheduling the step that is planned and dispatched is the next one, and
        the one that is updated was dispatched by the call before.

        Returns: the deltas of the samples, and what the step did.
        """
        started = self._clock()
        deltas, self._early_deltas = self._early_deltas, []
        scheduled = self.scheduler.schedule()
        pending = None
        if scheduled.scheduled or scheduled.saves or scheduled.restores or scheduled.lora_loads:
            pending = self.runner.execute(scheduled)
        previous, self._in_flight = self._in_flight, None
        if previous is not None:
            deltas += self._collect(previous)
        if isinstance(pending, MaskedStep):  # the tokens it depends on are known now
            pending = pending.choose(scheduled, self._mask_filler)
        dispatched = None if pending is None else _InFlight(scheduled, pending)
        if self._async_scheduling:
            self._in_flight = dispatched
        elif dispatched is not None:
            deltas += self._collect(dispatched)
        if previous is None and dispatched is None and self.scheduler.num_deferred:
            assert self._tiers is not None
            self._tiers.wait(_TIER_WAIT_SECONDS)
        return deltas, self.take_stats(step_seconds=self._clock() - started)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; see `Scheduler.reset_prefix_cache`."""
        self._drain()
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def advance_weights_epoch(self) -> None:
        """Forget all KV because the weights have changed; see `Scheduler.advance_weights_epoch`."""
        self._drain()
        self.scheduler.advance_weights_epoch()

    def update_params(self, params: Any) -> None:
        """Compute with other parameters from now on; see `LLM.update_params`.

        What has been computed with those before is forgotten. Unfinished requests keep their tokens
        and go on.

        Raises:
          ValueError: if the parameters do not fit; nothing has changed then.
        """
        self._drain()
        self.runner.update_params(params)
        self.scheduler.advance_weights_epoch()

    def abort_all_deltas(self, reason: FinishReason = FinishReason.ABORT) -> list[Delta]:
        """End all user requests; see `abort_deltas`."""
        return self.abort_deltas(self._outputs.parent_ids, reason)

    def snapshot(self) -> EngineSnapshot:
        """Return what the engine holds, for who watches it."""
        return take_snapshot(self.scheduler)

    def _drain(self) -> None:
        """Finish the step in flight; the next `step` returns its outputs."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            self._early_deltas += self._collect(in_flight)

    def _collect(self, step: "_InFlight") -> list[Delta]:
        """Wait for a dispatched step and return the deltas of its samples."""
        rows = step.scheduled.scheduled
        result = self._timed(
            "host_copies", lambda: [row.request for row in rows], step.pending.result
        )
        keep_pooled(step.scheduled, result)
        updates = self.scheduler.update(step.scheduled, result)
        self._stats.on_step(step.scheduled, updates)
        self._outputs.take_prompt_logprobs(result.prompt_logprobs)
        return self._timed(
            "detokenize",
            lambda: updates.requests,
            lambda: self._outputs.process(updates, result.logprobs, result.chosen_logprobs),
        )

    def measure_work(self) -> None:
        """From now on note, for every request, the time of work that it took part in."""
        self._measures_work = True

    def _timed[T](
        self, kind: str, requests: Callable[[], Iterable[Request]], function: Callable[[], T]
    ) -> T:
        """Call a function; note its time for these requests if work is measured."""
        if not self._measures_work:
            return function()
        return time_work(kind, requests, self._clock, function)

    def tier_stats(self) -> TierStats | None:
        """Return figures of the memory below the device, None if there is none; for any thread."""
        return None if self._tiers is None else self._tiers.stats()

    def take_stats(self, *, step_seconds: float = 0.0) -> StepStats:
        """Return what happened since the last call (`step` does so itself)."""
        return self._stats.take(self.scheduler, step_seconds=step_seconds)

    def close(self) -> None:
        """Abort everything and release the device's memory."""
        self.abort_all_deltas()
        self._in_flight = None
        self.runner.close()
        if self.grammars is not None:
            self.grammars.close()
        if self._tiers is not None:
            self._tiers.close()
