"""`Engine`: the synchronous core that joins scheduler, runner and detokenisers."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paged.models.tokenizer import Tokenizer
from paged.scheduler.admission import InputProcessor
from paged.scheduler.detokenizer import IncrementalDetokenizer
from paged.scheduler.logprobs import LogprobsBuilder
from paged.scheduler.output import (
    CompletionOutput,
    FinishReason,
    ModelRunnerOutput,
    PositionLogprobs,
    RequestOutput,
    SchedulerOutput,
    StepStats,
)
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import CacheMode, Request
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.stats import StatsBuilder
from paged.scheduler.step_rows import RequestUpdate

# How long an engine with nothing else to do waits for a load before it looks for new requests.
_TIER_WAIT_SECONDS = 0.005


class PendingStep(Protocol):
    """A step on its way; `result` waits for the device."""

    def result(self) -> ModelRunnerOutput:
        """Return the sampled tokens, waiting for them if need be."""
        ...


class Runner(Protocol):
    """What the engine needs of a runner; tests hand in one without a model."""

    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Start the step."""
        ...

    def close(self) -> None:
        """Release the device's memory."""
        ...


class WaitableTiers(Protocol):
    """What the engine needs of the tiers."""

    def wait(self, timeout: float) -> bool:
        """Return when some load has finished, or after so many seconds."""
        ...

    def close(self) -> None:
        """Release memory, files and threads."""
        ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step."""

    scheduled: SchedulerOutput
    pending: PendingStep


@dataclass(slots=True)
class _Sample:
    """What the engine keeps for one unfinished sample beside its request."""

    request: Request
    prompt: str | None
    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsBuilder | None


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
      tiers: the scheduler's memory below the device, to wait for; owned, closed by `close`.
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
        tiers: WaitableTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.processor = processor
        self.runner = runner
        self._clock = clock
        self._samples: dict[str, _Sample] = {}
        self._unfinished_of: dict[str, set[str]] = {}
        self._stats = StatsBuilder()
        self._async_scheduling = async_scheduling
        self._tiers = tiers
        self._in_flight: _InFlight | None = None
        self._early_outputs: list[RequestOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self._samples or self._early_outputs) or self._in_flight is not None

    @property
    def num_unfinished(self) -> int:
        """Samples that are waiting or running."""
        return len(self._samples)

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
    ) -> None:
        """Check a user request and queue its samples.

        Args:
          request_id: unique among unfinished requests.
          prompt_token_ids: ids of the prompt.
          params: sampling parameters.
          prompt: the prompt's text, handed back in the outputs.
          cache_salt, cache_mode, priority: as in `InputProcessor.process`.

        Raises:
          ParameterError: for what cannot be served (see `InputProcessor.process`).
          ValueError: if the id belongs to an unfinished request.
        """
        requests = self.processor.process(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            cache_mode=cache_mode,
            priority=priority,
        )
        self.add_processed(requests, prompt)

    def add_processed(self, requests: Sequence[Request], prompt: str | None = None) -> None:
        """Queue the samples of one user request that `processor` has already checked.

        Raises:
          ValueError: if an id belongs to an unfinished request; nothing is queued then.
          CapacityError: if the prompt can never fit into the pool.
        """
        parent_id = requests[0].parent_id
        taken = [r.request_id for r in requests if r.request_id in self._samples]
        if taken or parent_id in self._unfinished_of:
            used = taken[0] if taken else parent_id
            raise ValueError(f"Request {used!r} is not finished yet; use another request_id.")
        self.scheduler.check_fits(requests[0].num_prompt_tokens + 1)
        self._unfinished_of[parent_id] = {request.request_id for request in requests}
        for request in requests:
            params = request.params
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop_strings=params.stop_strings,
                include_stop_str=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            builder = None
            if params.logprobs is not None:
                builder = LogprobsBuilder(self.tokenizer, request.prompt_token_ids, params.logprobs)
            self._samples[request.request_id] = _Sample(request, prompt, detokenizer, builder)
            # The samples of one prompt have the same blocks: they are hashed once.
            request.block_hashes = list(requests[0].block_hashes)
            self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End user requests by id and free their blocks; unknown ids are ignored.

        Returns:
          One last output per aborted request, with finish reason "abort".
        """
        outputs = []
        for parent_id in request_ids:
            children = sorted(self._unfinished_of.get(parent_id, ()))
            for child_id in children:
                sample = self._samples[child_id]
                self.scheduler.finish(sample.request, FinishReason.ABORT)
                outputs.append(self._close(sample, sample.detokenizer.take_text(finished=True)))
        return outputs

    def step(self) -> tuple[list[RequestOutput], StepStats]:
        """Run one step: schedule, execute, update.

        With asynchronous scheduling the step that is planned and dispatched is the next one, and
        the one that is updated was dispatched by the call before.

        Returns:
          Deltas of the samples that advanced, and what the step did.
        """
        started = self._clock()
        outputs, self._early_outputs = self._early_outputs, []
        scheduled = self.scheduler.schedule()
        dispatched = None
        if scheduled.scheduled or scheduled.saves or scheduled.restores:
            dispatched = _InFlight(scheduled, self.runner.execute(scheduled))
        if self._async_scheduling:
            dispatched, self._in_flight = self._in_flight, dispatched
        if dispatched is not None:
            outputs += self._collect(dispatched)
        elif self._in_flight is None and self.scheduler.num_deferred:
            assert self._tiers is not None
            self._tiers.wait(_TIER_WAIT_SECONDS)
        return outputs, self.take_stats(step_seconds=self._clock() - started)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; see `Scheduler.reset_prefix_cache`."""
        self._drain()
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def advance_weights_epoch(self) -> None:
        """Forget all KV because the weights have changed; see `Scheduler.advance_weights_epoch`."""
        self._drain()
        self.scheduler.advance_weights_epoch()

    def _drain(self) -> None:
        """Finish the step in flight; the next `step` returns its outputs."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            self._early_outputs += self._collect(in_flight)

    def _collect(self, step: "_InFlight") -> list[RequestOutput]:
        """Wait for a dispatched step and return the deltas of its samples."""
        result = step.pending.result()
        updates = self.scheduler.update(step.scheduled, result)
        self._stats.on_step(step.scheduled, updates)
        outputs = []
        for update in updates:
            row_logprobs = None
            sample = self._samples[update.request.request_id]
            if sample.logprobs is not None and result.logprobs is not None:
                row_logprobs = sample.logprobs.build(
                    update.new_token_ids, result.logprobs, update.row
                )
            outputs.append(self._advance(sample, update, row_logprobs))
        return outputs

    def take_stats(self, *, step_seconds: float = 0.0) -> StepStats:
        """Return what happened since the last call (`step` does so itself)."""
        return self._stats.take(self.scheduler, step_seconds=step_seconds)

    def close(self) -> None:
        """Abort everything and release the device's memory."""
        self.abort(list(self._unfinished_of))
        self._in_flight = None
        self.runner.close()
        if self._tiers is not None:
            self._tiers.close()

    def _advance(
        self, sample: _Sample, update: RequestUpdate, logprobs: tuple[PositionLogprobs, ...] | None
    ) -> RequestOutput:
        """Turn one sample's new tokens into a delta, looking for stop strings on the way."""
        request = sample.request
        visible = update.new_token_ids
        stopped_by_token = request.finish_reason is FinishReason.STOP
        if stopped_by_token and not request.params.include_stop_str_in_output:
            visible = visible[:-1]  # the stop token itself is no text
        matched = sample.detokenizer.update(visible)
        if matched is not None:
            if request.is_finished:  # the step's token was also the last one allowed
                request.finish_reason, request.stop_reason = FinishReason.STOP, matched
            else:
                self.scheduler.finish(request, FinishReason.STOP, matched)
        text = sample.detokenizer.take_text(finished=request.is_finished)
        if request.is_finished:
            return self._close(sample, text, update.new_token_ids, logprobs)
        return self._output(sample, text, update.new_token_ids, logprobs)

    def _close(
        self,
        sample: _Sample,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[PositionLogprobs, ...] | None = None,
    ) -> RequestOutput:
        """Forget a finished sample and return its last output."""
        request = sample.request
        del self._samples[request.request_id]
        siblings = self._unfinished_of[request.parent_id]
        siblings.discard(request.request_id)
        if not siblings:
            del self._unfinished_of[request.parent_id]
        self._stats.on_finished(request, self._clock())
        return self._output(sample, text, token_ids, logprobs)

    def _output(
        self,
        sample: _Sample,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[PositionLogprobs, ...] | None,
    ) -> RequestOutput:
        request = sample.request
        reason = request.finish_reason
        completion = CompletionOutput(
            index=request.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.parent_id,
            prompt=sample.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=(completion,),
            finished=request.parent_id not in self._unfinished_of,
            num_cached_tokens=max(0, request.num_cached_tokens),
        )
