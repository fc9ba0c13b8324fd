"""`Scheduler`: which requests compute how many tokens in the next step; policy and nothing else.

There is no prefill phase and no decode phase. Every step moves the `num_computed_tokens` of the
chosen requests towards their `num_tokens` within one token budget, and a request samples when the
two meet. Chunked prefill, prefix hits, decoding and recomputation after a preemption all follow.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.errors import CapacityError
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.output import (
    FinishReason,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.request_queue import RequestQueue
from paged.scheduler.stop import check_stop


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step added to a request; the new tokens are already in its output.

    Attributes:
      request: the request; a finished one has its `finish_reason` and holds no blocks any more.
      row: its index in `SchedulerOutput.scheduled`, hence its row of the log probabilities.
      new_token_ids: tokens sampled in this step.
      is_first_token: whether they are the request's first.
      seconds_since_last_token: time since the token before them, 0 if they are the first.
      finish_reason: why the request ended with them, None if it goes on.
      stop_reason: the stop token id that ended it, if the caller listed one.
    """

    request: Request
    row: int
    new_token_ids: tuple[int, ...]
    is_first_token: bool
    seconds_since_last_token: float
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


class Scheduler:
    """First come, first served, with preemption by recomputation (mutable; one thread).

    Every `SchedulerOutput` must be run and handed to `update`, even if its requests have been
    aborted meanwhile: their full blocks are already published to the prefix cache.

    Args:
      pool: the KV blocks; nobody else allocates from it.
      max_num_seqs: most requests running at once.
      max_num_batched_tokens: token budget of a step.
      max_model_len: longest prompt plus output, tokens. One request of this length must fit into
        the pool (`check_fits`), or `schedule` may raise.
      long_prefill_token_threshold: most tokens of one request per step while it is not the only
        one; 0 sets no limit.
      enable_chunked_prefill: let a prompt enter in parts; without it, a prompt waits for a step
        with room for all of it.
      clock: seconds, monotonic.

    Raises: ValueError if a limit is below 1 or the budget is too small for the other limits.
    Source: vLLM `v1/core/sched/scheduler.py`.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int = 0,
        enable_chunked_prefill: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1.")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
                f"max_num_seqs={max_num_seqs}, or some running request could never decode."
            )
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
                f"max_model_len={max_model_len} without chunked prefill; raise it, or enable "
                "chunked prefill."
            )
        if long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold={long_prefill_token_threshold} must be at least 0."
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.pool = pool
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._enable_chunked_prefill = enable_chunked_prefill
        self._clock = clock
        self._kv = KVManager(pool)
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        # A dict keeps admission order, gives the last one and removes any one, all in O(1).
        self._running: dict[str, Request] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._prefix_queries = 0
        self._prefix_hits = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none: new or preempted."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._requests)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that running requests hold, 0 to 1."""
        return self.pool.usage

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests in the order of their admission."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting requests, next to be admitted first."""
        return tuple(self._waiting)

    def check_fits(self, num_tokens: int) -> None:
        """Refuse what could never be served: a length that the whole pool cannot hold.

        Ask at start-up for `max_model_len`, and per request for its prompt plus one token.

        Raises: CapacityError.
        """
        needed = self.pool.num_blocks_for(num_tokens)
        if needed > self.pool.num_usable:
            raise CapacityError(
                f"num_tokens={num_tokens} needs {needed} KV blocks of {self.pool.block_size} "
                f"tokens, but the cache has only {self.pool.num_usable}; shorten the prompt, "
                "lower max_model_len, or give the cache more memory (gpu_memory_utilization or "
                "kv_cache_memory_bytes)."
            )

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
          ValueError: the id is in use, or the prompt is empty or leaves no room for a token.
          CapacityError: the prompt and one token can never fit into the pool.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id={request.request_id!r} is in use by another request.")
        if not 0 < request.num_prompt_tokens < self.max_model_len:
            raise ValueError(
                f"prompt of {request.num_prompt_tokens} tokens must have at least 1 and fewer than "
                f"max_model_len={self.max_model_len}: one token has to follow it."
            )
        self.check_fits(request.num_prompt_tokens + 1)
        self._kv.extend_hashes(request)
        request.status = RequestStatus.WAITING
        request.queued_time = self._clock()
        self._requests[request.request_id] = request
        self._waiting.push(request)
        self.pool.policy.expect(request.request_id, request.block_hashes)

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and give them blocks.

        Rows of a single token come first, which attention kernels handle apart, then the others;
        each part in admission order.

        Raises: RuntimeError if requests wait and none can ever be scheduled.
        """
        step = _Step(self.max_num_batched_tokens)
        if self._long_prefill_token_threshold and self.num_unfinished > 1:
            step.request_cap = self._long_prefill_token_threshold
        self._schedule_running(step)
        # Blocks that a preemption has freed are for those who already run.
        if not step.preempted:
            self._schedule_waiting(step)
        output = step.output()
        assert output.num_tokens <= self.max_num_batched_tokens
        assert len(self._running) <= self.max_num_seqs
        if not self._running and self._waiting:
            self._raise_stuck(self._waiting.peek())
        return output

    def update(
        self, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Append the sampled tokens and end the requests that are complete.

        Blocks of finished requests are free when this returns. Requests that ended since
        `schedule` are skipped.

        Returns: one entry per request that got a token, in batch order.
        Raises: ValueError if the runner's rows are not those of `output`.
        """
        token_ids = runner_output.token_ids.tolist()
        if len(token_ids) != len(output.scheduled):
            raise ValueError(
                f"runner_output has {len(token_ids)} rows for {len(output.scheduled)} scheduled "
                "requests; pass the output of this very step."
            )
        now = self._clock()
        return [
            self._append(scheduled.request, row, token_ids[row], now)
            for row, scheduled in enumerate(output.scheduled)
            if scheduled.samples and not scheduled.request.is_finished
        ]

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """End a request in any state and free its blocks; does nothing if it has ended."""
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
            self._release_row(request)
        else:
            self._waiting.remove(request)
            self.pool.policy.forget(request.request_id)
        self._kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[Request]:
        """End these requests and return them; ids that are unknown or have ended are ignored."""
        found = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in found:
            self.finish(request, reason)
        return found

    def take_prefix_stats(self) -> tuple[int, int]:
        """Return tokens looked up in the prefix cache, and found there, since the last call.

        Each request counts once, when it is first scheduled; nothing counts if caching is off.
        """
        taken = self._prefix_queries, self._prefix_hits
        self._prefix_queries = self._prefix_hits = 0
        return taken

    def _schedule_running(self, step: "_Step") -> None:
        for request in list(self._running.values()):
            if not step.budget or request.status is not RequestStatus.RUNNING:
                return
            num_tokens = step.clip(request.num_tokens - request.num_computed_tokens)
            if not num_tokens:
                # Its last token is still on the device; those behind it need not wait.
                continue
            while not self._kv.extend(request, num_tokens):
                victim = self._preempt_last(step)
                if victim is request:
                    return
            step.add(request, num_tokens)

    def _preempt_last(self, step: "_Step") -> Request:
        """Take all blocks from the request admitted last; its output stays and is recomputed.

        It has not been scheduled in this step: the loop over running requests goes by admission
        order and stops at the first victim it meets.
        """
        _, victim = self._running.popitem()
        self._release_row(victim)
        self._kv.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        # Victims come last first, so putting each in front keeps their order.
        self._waiting.push_preempted(victim)
        self.pool.policy.expect(victim.request_id, victim.block_hashes)
        step.preempted.insert(0, victim)
        return victim

    def _release_row(self, request: Request) -> None:
        self._free_rows.append(request.batch_row)
        request.batch_row = -1

    def _schedule_waiting(self, step: "_Step") -> None:
        while step.budget and self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.peek()
            cached_blocks = self._kv.find_cached_blocks(request)
            num_cached_tokens = len(cached_blocks) * self.pool.block_size
            remaining = request.num_tokens - num_cached_tokens
            if not self._enable_chunked_prefill and remaining > step.budget:
                return
            num_tokens = step.clip(remaining)
            # No request overtakes the head of the queue, or a long prompt might starve.
            if not self._kv.admit(request, num_tokens, cached_blocks):
                return
            self._waiting.remove(request)
            self.pool.policy.forget(request.request_id)
            self.pool.policy.lookup(request.block_hashes, len(cached_blocks))
            self._running[request.request_id] = request
            request.batch_row = self._free_rows.pop()
            request.status = RequestStatus.RUNNING
            if request.num_cached_tokens < 0:
                self._record_first_scheduling(request, num_cached_tokens)
            step.add(request, num_tokens)

    def _record_first_scheduling(self, request: Request, num_cached_tokens: int) -> None:
        """Count the prefix hit, once per request: after a preemption it would hit its own work."""
        request.num_cached_tokens = num_cached_tokens
        request.scheduled_time = self._clock()
        if self.pool.enable_caching:
            self._prefix_queries += request.num_tokens
            self._prefix_hits += num_cached_tokens

    def _append(self, request: Request, row: int, token_id: int, now: float) -> RequestUpdate:
        is_first = not request.output_token_ids
        gap = 0.0 if is_first else now - request.last_token_time
        request.output_token_ids.append(token_id)
        request.last_token_time = now
        if is_first:
            request.first_token_time = now
        stop = check_stop(request, self.max_model_len)
        if stop is None:
            self._kv.extend_hashes(request)
            return RequestUpdate(request, row, (token_id,), is_first, gap)
        self.finish(request, *stop)
        return RequestUpdate(request, row, (token_id,), is_first, gap, *stop)

    def _raise_stuck(self, head: Request) -> None:
        pool = self.pool
        raise RuntimeError(
            f"request {head.request_id!r} with {head.num_tokens} tokens needs "
            f"{pool.num_blocks_for(head.num_tokens)} KV blocks and nothing else runs, but only "
            f"{pool.num_free} of {pool.num_usable} are free: either one request of max_model_len="
            f"{self.max_model_len} does not fit into the pool, which check_fits must refuse at "
            "start-up, or blocks have leaked."
        )


class _Step:
    """What one `schedule` call has decided so far (mutable)."""

    __slots__ = (
        "_longer",
        "_single",
        "budget",
        "preempted",
        "request_cap",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.request_cap = budget
        self.preempted: list[Request] = []
        self._single: list[ScheduledRequest] = []
        self._longer: list[ScheduledRequest] = []

    def clip(self, num_tokens: int) -> int:
        """Return how many of these tokens one request may compute in what is left of the step."""
        return min(num_tokens, self.budget, self.request_cap)

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` of a request, whose blocks are ready."""
        start = request.num_computed_tokens
        end = start + num_tokens
        # Now and not when the step returns, so that the next one can be scheduled meanwhile.
        request.num_computed_tokens = end
        self.budget -= num_tokens
        rows = self._single if num_tokens == 1 else self._longer
        rows.append(ScheduledRequest(request, start, num_tokens, end == request.num_tokens))

    def output(self) -> SchedulerOutput:
        """Return the step as a message."""
        scheduled = (*self._single, *self._longer)
        return SchedulerOutput(
            scheduled=scheduled,
            num_tokens=sum(row.num_tokens for row in scheduled),
            preempted=tuple(self.preempted),
        )
