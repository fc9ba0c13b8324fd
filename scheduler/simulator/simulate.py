"""`simulate`: a trace through the real `Scheduler` and `BlockPool`, with a clock and no device.

Everything that decides is the engine's own code; only the tokens are counted instead of sampled,
the content is named instead of hashed, and a step takes as long as a formula says.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
from tqdm import tqdm

from paged.scheduler.errors import CapacityError
from paged.scheduler.output import ModelRunnerOutput, ScheduledRequest
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.pools import make_pool, num_queued
from paged.scheduler.simulator.result import PassStats, SimulationResult
from paged.scheduler.simulator.simulated_request import SimulatedRequest, make_request
from paged.scheduler.simulator.sleeping_decodes import SleepingDecodes
from paged.scheduler.simulator.step_cost import StepCost, StepLoad, UnitSteps
from paged.scheduler.simulator.step_log import StepLog
from paged.scheduler.simulator.trace import Trace, TraceRequest
from paged.scheduler.step_rows import RequestUpdate


def simulate(
    trace: Trace,
    config: SimulationConfig,
    cost: StepCost | None = None,
    *,
    progress: bool = False,
) -> SimulationResult:
    """Serve a trace and return what happened.

    Args:
      trace: read once, as a stream.
      config: what serves it.
      cost: how long a step takes, such as a `Roofline`; None counts every step as one second.
      progress: show a bar on standard error.

    Raises:
      ValueError: if the limits contradict each other (see `Scheduler`) or the policy is unknown;
        `CapacityError`, which is one, if the pool cannot hold `max_model_len` tokens.
    """
    with tqdm(
        total=trace.num_requests, desc=f"{trace.name} {config.policy}", unit="req",
        disable=not progress, mininterval=0.5,
    ) as bar:  # fmt: skip
        return _Simulation(trace, config, cost or UnitSteps(), bar).run()


class _Simulation:
    """One run (mutable)."""

    def __init__(
        self, trace: Trace, config: SimulationConfig, cost: StepCost, bar: "tqdm[None]"
    ) -> None:
        self._config = config
        self._cost = cost
        self._bar = bar
        self._now = 0.0
        self._pool = pool = make_pool(config, trace)
        self._max_model_len = config.max_model_len or pool.num_usable * config.block_size
        limit = config.concurrency
        self._scheduler = Scheduler(
            pool=pool,
            max_num_seqs=min(config.max_num_seqs, limit) if limit else config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            clock=lambda: self._now,
        )
        self._scheduler.check_fits(self._max_model_len)
        # Under a cap per request decodes may have to wait for prefills before them, and by priority
        # a victim may stand before others: then every row takes part in every step.
        self._skips = (
            config.skip_decodes
            and not config.long_prefill_token_threshold
            and config.scheduling_policy == "fcfs"
        )
        self._sleeping = SleepingDecodes(
            config.block_size, config.enable_prefix_caching, self._max_model_len
        )
        self._incoming: Iterator[tuple[int, TraceRequest]] = zip(count(), trace)
        self._next = next(self._incoming, None)
        self._limit = limit + num_queued(config) if limit else None  # requests in the scheduler
        self._token_budget = config.max_num_batched_tokens
        self._step = 0
        self._head_is_stuck = False
        self._awake_computed = 0  # tokens in the blocks of running requests that are awake
        self._held_blocks = 0  # of running requests, shared ones once per request
        self._tokens = np.zeros(config.max_num_seqs, np.int32)
        self._passes: dict[int, PassStats] = {}
        self._result = SimulationResult(
            trace=trace.name,
            policy=config.policy,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            device=cost.name,
            steps=StepLog(pool.num_usable, config.block_size),
        )
        self._totals = self._result.totals
        self._latencies = self._result.latencies

    def run(self) -> SimulationResult:
        """Serve all requests."""
        if self._next is not None and self._limit is None:
            self._now = self._next[1].arrival_seconds
        started = self._now
        while True:
            self._submit()
            if self._scheduler.num_unfinished:
                if self._is_quiet():
                    self._run_quiet_steps()
                else:
                    self._run_step()
            elif self._next is not None:
                self._now = max(self._now, self._next[1].arrival_seconds)
            else:
                break
        assert self._pool.num_free == self._pool.num_usable, "blocks have leaked"
        assert self._held_blocks == self._awake_computed == self._sleeping.num_asleep == 0
        self._result.duration_seconds = self._now - started
        last_pass = max(self._passes, default=-1)
        self._result.passes = [self._passes.get(i, PassStats()) for i in range(last_pass + 1)]
        return self._result

    def _submit(self) -> None:
        """Put the requests that are due into the queue."""
        limit, scheduler = self._limit, self._scheduler
        while self._next is not None:
            index, traced = self._next
            if limit is None:
                if traced.arrival_seconds > self._now:
                    return
                arrival = traced.arrival_seconds
            else:
                if scheduler.num_unfinished >= limit:
                    return
                arrival = self._now
            config = self._config
            request = make_request(
                index, traced, arrival, config.block_size, config.enable_prefix_caching
            )
            if request.num_prompt_tokens < self._max_model_len:
                try:
                    scheduler.add(request)
                except CapacityError:
                    self._reject()
            else:
                self._reject()
            self._next = next(self._incoming, None)

    def _reject(self) -> None:
        self._totals.num_rejected += 1
        self._bar.update()

    def _run_step(self) -> None:
        """Schedule a step, let its time pass, and hand its tokens to the scheduler."""
        scheduler, sleeping = self._scheduler, self._sleeping
        for request in sleeping.wake(self._step, self._now):
            request.seen_computed = request.num_computed_tokens
            self._awake_computed += request.seen_computed
        # Rows asleep would each have taken a token of the budget before any prefill.
        scheduler.max_num_batched_tokens = self._token_budget - sleeping.num_asleep
        output = scheduler.schedule()
        for victim in output.preempted:
            assert isinstance(victim, SimulatedRequest)
            self._settle_preempted(victim)
        started = self._now
        self._pass_time(self._load_of(output.scheduled), len(output.preempted))
        # Nobody is admitted in the step of a preemption, whatever fits.
        self._head_is_stuck = not output.scheduled and not output.preempted
        tokens = ModelRunnerOutput(self._tokens[: len(output.scheduled)])
        self._process(scheduler.update(output, tokens), self._now - started)
        sleeping.advance()
        self._step += 1
        if self._skips:
            self._send_to_sleep(output.scheduled)

    def _send_to_sleep(self, rows: Sequence[ScheduledRequest]) -> None:
        """Leave out of the coming steps what is decoding and can be left out."""
        for row in rows:
            request = row.request
            assert isinstance(request, SimulatedRequest)
            if row.samples and not request.is_finished:
                computed = request.seen_computed
                if self._sleeping.try_sleep(request, self._step):
                    self._awake_computed -= computed

    def _is_quiet(self) -> bool:
        """Whether the coming step has no rows but those asleep, and nobody can be admitted."""
        scheduler, sleeping = self._scheduler, self._sleeping
        return (
            0 < sleeping.num_asleep == scheduler.num_running
            and sleeping.next_wake_step != self._step
            and (
                not scheduler.num_waiting
                or self._head_is_stuck
                or scheduler.num_running == scheduler.max_num_seqs
            )
        )

    def _run_quiet_steps(self) -> None:
        """Let steps pass until a row has to be back or a request arrives."""
        sleeping, gaps = self._sleeping, self._latencies["itl"]
        num_rows = sleeping.num_asleep
        arrives = self._next[1].arrival_seconds if self._next and not self._limit else None
        while self._step != sleeping.next_wake_step:
            started = self._now
            self._pass_time(StepLoad(), 0)
            gaps.add(self._now - started, num_rows)
            self._totals.output_tokens += num_rows
            sleeping.advance()
            self._step += 1
            if arrives is not None and arrives <= self._now:
                return

    def _load_of(self, rows: Sequence[ScheduledRequest]) -> StepLoad:
        """Return what the rows of a step cost, and take note of what they did."""
        block_size = self._config.block_size
        num_samples = attended = context = 0
        for row in rows:
            request, start, num_tokens = row.request, row.start, row.num_tokens
            assert isinstance(request, SimulatedRequest)
            end = start + num_tokens
            context += end
            attended += num_tokens * start + num_tokens * (num_tokens + 1) // 2
            if not request.is_admitted:
                self._record_admission(request)
            if start < request.max_computed:
                self._totals.recomputed_tokens += min(end, request.max_computed) - start
            if row.samples:
                num_samples += 1
                # The token that this step samples may complete a block.
                if not (end + 1) % block_size:
                    request.extend_known_hashes(end + 1, block_size)
            num_blocks = len(request.block_ids)
            self._held_blocks += num_blocks - request.seen_blocks
            request.seen_blocks = num_blocks
            self._awake_computed += end - request.seen_computed
            request.seen_computed = end
        num_tokens = sum([row.num_tokens for row in rows])
        return StepLoad(num_tokens, num_samples, attended, context)

    def _pass_time(self, awake: StepLoad, num_preempted: int) -> None:
        """Let the clock go on by one step of these rows and those asleep, and log it."""
        pool, scheduler, sleeping = self._pool, self._scheduler, self._sleeping
        num_asleep, context = sleeping.num_asleep, sleeping.context_tokens
        load = StepLoad(
            awake.num_tokens + num_asleep,
            awake.num_samples + num_asleep,
            awake.attended_pairs + context,
            awake.context_tokens + context,
        )
        seconds = self._cost.step_seconds(load)
        self._result.steps.append(
            self._now,
            seconds,
            load.num_tokens,
            scheduler.num_running,
            scheduler.num_waiting,
            pool.num_usable - pool.num_free,
            self._held_blocks * pool.block_size - self._awake_computed - context,
            num_preempted,
        )
        self._totals.computed_tokens += load.num_tokens
        self._totals.num_preemptions += num_preempted
        self._now += seconds

    def _process(self, updates: Sequence[RequestUpdate], step_gap: float) -> None:
        """Record the tokens of a step; `step_gap` is the gap of a row that had one before, too."""
        latencies, now = self._latencies, self._now
        num_regular = self._sleeping.num_asleep
        for update in updates:
            request = update.request
            assert isinstance(request, SimulatedRequest)
            if update.is_first_token:
                latencies["ttft"].add(now - request.arrival_time)
            elif update.seconds_since_last_token == step_gap:
                num_regular += 1
            else:
                latencies["itl"].add(update.seconds_since_last_token)
            if update.finish_reason is not None:
                self._record_end(request)
        if num_regular:
            latencies["itl"].add(step_gap, num_regular)
        self._totals.output_tokens += len(updates) + self._sleeping.num_asleep

    def _record_admission(self, request: SimulatedRequest) -> None:
        request.is_admitted = True
        stats = self._passes.setdefault(request.pass_index, PassStats())
        stats.num_requests += 1
        stats.prompt_tokens += request.num_prompt_tokens
        stats.hit_tokens += request.num_cached_tokens

    def _settle_preempted(self, request: SimulatedRequest) -> None:
        """Take note of the work that a request loses with its blocks."""
        computed = request.seen_computed
        if request.wake_step >= 0:
            computed = self._sleeping.settle(request, self._step, self._now)
        else:
            self._awake_computed -= computed
        request.max_computed = max(request.max_computed, computed)
        self._held_blocks -= request.seen_blocks
        request.seen_blocks = request.seen_computed = 0

    def _record_end(self, request: SimulatedRequest) -> None:
        self._awake_computed -= request.seen_computed
        self._held_blocks -= request.seen_blocks
        num_outputs = len(request.output_token_ids)
        self._latencies["e2e"].add(self._now - request.arrival_time)
        if num_outputs > 1:
            generating = request.last_token_time - request.first_token_time
            self._latencies["tpot"].add(generating / (num_outputs - 1))
        self._totals.num_finished += 1
        self._totals.num_truncated += num_outputs < request.output_length
        self._bar.update()
