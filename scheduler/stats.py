"""`StatsBuilder`: collects what happened between two steps into one `StepStats`."""

from collections.abc import Callable

from paged.scheduler.output import (
    DeviceWork,
    FinishedRequestStats,
    Moments,
    SchedulerOutput,
    StepStats,
)
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.step_rows import StepUpdates


class StatsBuilder:
    """Accumulates one step's figures; `take` hands them out and starts anew.

    Args:
      estimate_work: what each device does in a step; None: it is not reported.
    """

    def __init__(
        self, estimate_work: Callable[[SchedulerOutput], DeviceWork] | None = None
    ) -> None:
        self._estimate_work = estimate_work
        self._finished: list[FinishedRequestStats] = []
        self._reset()

    def _reset(self) -> None:
        self._step_tokens: list[int] = []
        self._num_generated = 0
        self._num_prompt = 0
        self._num_cached = 0
        self._restored: dict[str, int] = {}
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._finished = []
        self._work = DeviceWork()

    def on_step(self, scheduled: SchedulerOutput, updates: StepUpdates) -> None:
        """Record one executed step and the tokens it gave."""
        if scheduled.num_tokens:
            self._step_tokens.append(scheduled.num_tokens)
            if self._estimate_work is not None:
                pairs = zip(self._work, self._estimate_work(scheduled), strict=True)
                self._work = DeviceWork(*map(sum, pairs))
        self._num_generated += updates.num_tokens
        for index in updates.firsts:
            request = updates.requests[index]
            self._ttft.append(request.first_token_time - request.arrival_time)
            self._num_prompt += request.num_prompt_tokens
            self._num_cached += request.num_cached_tokens
            for medium, num_tokens in request.restored_tokens.items():
                self._restored[medium] = self._restored.get(medium, 0) + num_tokens
        if updates.firsts:
            has_no_gap = set(updates.firsts)
            self._itl += [gap for i, gap in enumerate(updates.gaps) if i not in has_no_gap]
        else:
            self._itl += updates.gaps

    def on_finished(self, request: Request, now: float) -> None:
        """Record the end of a sample at `now` (monotonic seconds)."""
        first, last = request.first_token_time, request.last_token_time
        scheduled = request.scheduled_time
        assert request.finish_reason is not None
        self._finished.append(
            FinishedRequestStats(
                finish_reason=request.finish_reason.value,
                num_prompt_tokens=request.num_prompt_tokens,
                num_generation_tokens=len(request.output_token_ids),
                max_tokens=request.max_tokens,
                n=request.num_samples,
                e2e_seconds=now - request.arrival_time,
                queue_seconds=_span(request.queued_time, scheduled),
                prefill_seconds=_span(scheduled, first),
                decode_seconds=_span(first, last),
                inference_seconds=_span(scheduled, last),
                num_preemptions=request.num_preemptions,
                num_cached_tokens=max(0, request.num_cached_tokens),
                request_id=request.parent_id,
                index=request.index,
                moments=Moments(
                    request.arrival_time, request.queued_time, scheduled, first, last, now
                ),
                work=request.work,
            )
        )

    def take(self, scheduler: Scheduler, *, step_seconds: float) -> StepStats:
        """Return the step's figures, with the scheduler's state after it."""
        prefix = scheduler.take_prefix_stats()
        num_preempted, num_discarded = scheduler.take_preemptions()
        stats = StepStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            num_deferred=scheduler.num_deferred + scheduler.loras.num_blocked,
            step_tokens=tuple(self._step_tokens),
            num_prompt_tokens=self._num_prompt,
            num_cached_prompt_tokens=self._num_cached,
            restored_prompt_tokens=self._restored,
            num_generation_tokens=self._num_generated,
            prefix_queries=prefix.queries,
            prefix_hits=prefix.hits,
            prefix_evicted=prefix.evicted,
            external_prefix_queries=prefix.external_queries,
            external_prefix_hits=prefix.external_hits,
            num_discarded_tokens=num_discarded,
            num_preempted=num_preempted,
            ttft_seconds=tuple(self._ttft),
            itl_seconds=tuple(self._itl),
            finished=tuple(self._finished),
            running_loras=scheduler.loras.running_names,
            waiting_loras=scheduler.loras.waiting_names,
            step_seconds=step_seconds,
            block_residencies=scheduler.take_block_residencies(),
            work=self._work,
        )
        self._reset()
        return stats


def _span(start: float, end: float) -> float:
    """Return end - start, or 0 if either moment was never reached."""
    return max(0.0, end - start) if start and end else 0.0
