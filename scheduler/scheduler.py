"""`Scheduler`: which requests compute how many tokens in the next step; policy and nothing else.

There is no prefill phase and no decode phase. Every step moves the `num_computed_tokens` of the
chosen requests towards their `num_tokens` within one token budget, and a request samples when the
two meet. Chunked prefill, prefix hits, decoding and recomputation after a preemption all follow.

A step may be planned while the device still works on the one before: a sample that is in flight
counts as a token whose value is not known yet (docs/decisions/0018).
"""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.block_residency import BlockResidency
from paged.scheduler.errors import CapacityError
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.lora_slots import LoRASlots
from paged.scheduler.output import FinishReason, ModelRunnerOutput, SchedulerOutput
from paged.scheduler.pins import PrefixPins
from paged.scheduler.prefill_limits import PrefillLimits, check_limits
from paged.scheduler.prefix_cache import PrefixHasher
from paged.scheduler.prefix_stats import HitCounter, PrefixStats
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.request_book import RequestBook
from paged.scheduler.request_queue import make_request_queue
from paged.scheduler.restoring import Restorer, Tiers
from paged.scheduler.sample_intake import SampleIntake
from paged.scheduler.sample_leaders import SampleLeaders
from paged.scheduler.step_choice import StepChooser
from paged.scheduler.step_rows import StepRows, StepUpdates


class Scheduler:
    """Admission, token budgets and preemption by recomputation (mutable; one thread).

    Every `SchedulerOutput` must be run, in order, and handed to `update`, even if its requests
    have been aborted meanwhile: their full blocks are already published to the prefix cache. At
    most one step may wait for its `update` when the next one is scheduled.

    Args:
      pool: the KV blocks; nobody else allocates from it.
      max_num_seqs: most requests running at once.
      max_num_batched_tokens: token budget of a step.
      max_model_len: longest prompt plus output, tokens. One request of this length must fit into
        the pool (`check_fits`), or `schedule` may raise.
      policy: "fcfs" serves in order of arrival and preempts who was admitted last; "priority"
        admits by (`Request.priority`, arrival) and preempts the least urgent.
      long_prefill_token_threshold, max_num_partial_prefills, max_long_partial_prefills: see
        `PrefillLimits`.
      enable_chunked_prefill: let a prompt enter in parts; without it, a prompt waits for a step
        with room for all of it.
      windows: the cache groups, see `KVManager`.
      hasher: names block contents, see `KVManager`.
      max_loras: most different adapters of admitted requests; others wait, and are overtaken. 0:
        requests have none.
      tiers: memory below the device that evicted blocks go to and come back from; None: none.
      clock: seconds, monotonic.

    Attributes:
      max_num_seqs, max_num_batched_tokens: as given; read anew in every step, so they may be
        lowered for one (the simulator's `SleepingDecodes`).

    Raises: ValueError if a limit is below 1 or the budget is too small for the other limits.
    Source: vLLM `v1/core/sched/scheduler.py`, `v1/core/sched/async_scheduler.py`.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        max_num_partial_prefills: int | None = None,
        max_long_partial_prefills: int | None = None,
        enable_chunked_prefill: bool = True,
        windows: Sequence[int | None] = (None,),
        hasher: PrefixHasher | None = None,
        max_loras: int = 0,
        tiers: Tiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.pool = pool
        self._clock = clock
        self._kv = KVManager(
            pool, windows=windows, max_num_batched_tokens=max_num_batched_tokens, hasher=hasher
        )
        self._restorer = Restorer(self._kv, pool, tiers)
        self.loras = LoRASlots(max_loras)
        self._book = RequestBook(
            kv=self._kv,
            pool=pool,
            restorer=self._restorer,
            queue=make_request_queue(policy),
            loras=self.loras,
            max_num_seqs=max_num_seqs,
        )
        self._leaders = SampleLeaders(is_needed=not pool.enable_caching)
        self._pins = PrefixPins(pool, reserve=self._kv.num_blocks_for(max_model_len), clock=clock)
        self._hits = HitCounter(pool, self._restorer)
        self._chooser = StepChooser(
            book=self._book,
            kv=self._kv,
            pool=pool,
            restorer=self._restorer,
            loras=self.loras,
            leaders=self._leaders,
            hits=self._hits,
            max_model_len=max_model_len,
            prefill_limits=PrefillLimits(
                long_prefill_token_threshold=long_prefill_token_threshold,
                max_num_partial_prefills=max_num_partial_prefills,
                max_long_partial_prefills=max_long_partial_prefills,
            ),
            enable_chunked_prefill=enable_chunked_prefill,
            is_by_priority=policy == "priority",
            clock=clock,
        )
        self._intake = SampleIntake(
            self._kv, pool, self._pins, finish=self.finish, max_model_len=max_model_len
        )

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._book.running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not: new, preempted, or with a prefix on its way."""
        return self._book.num_waiting

    @property
    def num_unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._book)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that are referenced, 0 to 1."""
        return self.pool.usage

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests in the order of their admission."""
        return tuple(self._book.running.values())

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting requests without blocks, next to be admitted first."""
        return tuple(self._book.waiting)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """All requests, in order of arrival."""
        return tuple(self._book)

    @property
    def num_deferred(self) -> int:
        """Waiting requests whose prefix is on its way from a lower tier."""
        return self._restorer.num_loading

    def check_fits(self, num_tokens: int) -> None:
        """Refuse what could never be served: a length that the whole pool cannot hold.

        Ask at start-up for `max_model_len`, and per request for its prompt plus one token.

        Raises: CapacityError.
        """
        needed = self._kv.num_blocks_for(num_tokens)
        if needed > self.pool.num_usable:
            raise CapacityError(
                f"num_tokens={num_tokens} needs {needed} KV blocks of {self.pool.block_size} "
                f"tokens, but the cache has only {self.pool.num_usable}; shorten the prompt, "
                "lower max_model_len, or give the cache more memory (gpu_memory_utilization or "
                "kv_cache_memory_bytes)."
            )

    def add(self, request: Request) -> None:
        """Put a new request into the queue.

        Raises:
          ValueError: the id is in use, or the prompt is empty or leaves no room for a token.
          CapacityError: the prompt and one token can never fit into the pool.
        """
        self._check_new(request)
        self._register(request)
        self._book.enqueue(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Add a request that shares the blocks of a running one, as beams and samples do.

        Args:
          parent: running; goes on as before.
          child: new; its known tokens start with the parent's, as far as those are computed, or
            end among them. What the two write from then on is each one's own (copy on write).

        Raises: ValueError as `add`, or if the parent does not run or the tokens disagree.
        """
        self._check_new(child)
        if parent.status is not RequestStatus.RUNNING or parent not in self._book:
            raise ValueError(f"parent {parent.request_id!r} is not running: nothing to share.")
        num_shared = min(parent.num_computed_tokens, child.num_tokens)
        num_known = min(num_shared, parent.num_tokens)
        has_other_keys = (child.cache_salt, child.lora) != (parent.cache_salt, parent.lora)
        if (
            has_other_keys
            or num_shared > num_known
            or child.tokens(0, num_known) != parent.tokens(0, num_known)
        ):
            raise ValueError(
                f"child {child.request_id!r} does not start with the {num_shared} tokens that "
                f"parent {parent.request_id!r} has computed, under the same salt and adapter; "
                "nothing can be shared."
            )
        self._register(child)
        self._kv.fork(parent, child)
        self._book.hold(child)

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and give them blocks.

        Rows of a single token come first, which attention kernels handle apart, then the others;
        each part in admission order. The step may be empty: everybody waits for a sample in
        flight or for a lower tier.

        Raises: RuntimeError if requests wait and none can ever be scheduled.
        """
        if self._pins:
            self._pins.release_expired()
        step, restores = self._chooser.choose(self.max_num_batched_tokens, self.max_num_seqs)
        output = step.output(
            block_copies=self._kv.take_copies(),
            saves=self._restorer.take_saves(),
            restores=restores,
            lora_loads=self.loras.take_loads(),
        )
        assert output.num_tokens <= self.max_num_batched_tokens
        assert self.num_running <= self.max_num_seqs
        if self._book.waiting and not (self._book.running or self._book.held):
            self._check_not_stuck(self._book.waiting.peek())
        return output

    def update(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> StepUpdates:
        """Append the sampled tokens and end the requests that are complete.

        Blocks of finished requests are free when this returns. Requests that ended since
        `schedule` are skipped; those preempted since get their token, it is a valid sample.

        Returns: one entry per request that got a token, in batch order.
        Raises: ValueError if the runner's rows are not those of `output`.
        """
        token_ids = runner_output.token_ids.tolist()
        if len(token_ids) != len(output.scheduled):
            raise ValueError(
                f"runner_output has {len(token_ids)} rows for {len(output.scheduled)} scheduled "
                "requests; pass the output of this very step."
            )
        return self._intake.take(StepRows.of(output.scheduled), token_ids, self._clock())

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """End a request in any state and free its blocks; does nothing if it has ended."""
        if request not in self._book:
            return
        self._leaders.on_end(request)
        self._book.end(request, reason, stop_reason)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[Request]:
        """End these requests and return them; ids that are unknown or have ended are ignored."""
        named = [self._book.get(request_id) for request_id in dict.fromkeys(request_ids)]
        found = [request for request in named if request is not None]
        for request in found:
            self.finish(request, reason)
        return found

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached content, on the device and below it; pins are dropped.

        Args:
          reset_running_requests: preempt everybody first; otherwise nothing is forgotten while
            somebody holds blocks.

        Returns: whether it was forgotten.
        """
        if reset_running_requests:
            self._book.preempt_everybody()
        if self._book.num_admitted:
            return self.pool.reset_prefix_cache()  # which says how many blocks are held
        self._pins.clear()
        self._restorer.clear()
        return self.pool.reset_prefix_cache()

    def advance_weights_epoch(self) -> None:
        """Make all KV computed so far unreachable, because the weights have changed.

        Running requests are preempted and recomputed with the new weights; what they have
        generated stays. Hand the last step to `update` first.
        """
        self._book.preempt_everybody()
        self._kv.hasher.advance_epoch()
        self._pins.clear()
        # Another process may count the epochs of other weights: the name has to be unique.
        self._restorer.clear(uuid.uuid4().hex)
        self.pool.reset_prefix_cache()
        self._book.rehash_waiting()

    def take_prefix_stats(self) -> PrefixStats:
        """Return tokens looked up in the prefix caches, and found there, since the last call.

        Each request counts once, when it is first scheduled; nothing counts if caching is off.
        """
        return self._hits.take()

    def take_block_residencies(self) -> tuple[BlockResidency, ...]:
        """Return the stays of followed blocks that have ended since the last call."""
        residency = self.pool.residency
        return () if residency is None else residency.take()

    def take_preemptions(self) -> tuple[int, int]:
        """Return preemptions since the last call, and how many computed tokens they threw away."""
        book = self._book
        taken = book.num_preemptions, book.num_discarded_tokens
        book.num_preemptions = book.num_discarded_tokens = 0
        return taken

    def _check_new(self, request: Request) -> None:
        if self._book.get(request.request_id) is not None:
            raise ValueError(f"request_id={request.request_id!r} is in use by another request.")
        if not 0 < request.num_prompt_tokens < self.max_model_len:
            raise ValueError(
                f"prompt of {request.num_prompt_tokens} tokens must have at least 1 and fewer than "
                f"max_model_len={self.max_model_len}: one token has to follow it."
            )
        self.check_fits(request.num_prompt_tokens + 1)

    def _register(self, request: Request) -> None:
        self._book.register(request)
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.max_tokens, self.max_model_len
        )
        request.queued_time = self._clock()

    def _check_not_stuck(self, head: Request) -> None:
        """Raise if nothing that is under way can ever make room for the head of the queue."""
        if head.num_in_flight or self._restorer.num_loading:
            return
        pool = self.pool
        raise RuntimeError(
            f"request {head.request_id!r} with {head.num_tokens} tokens needs "
            f"{self._kv.num_blocks_for(head.num_tokens)} KV blocks and nothing else runs, but only "
            f"{pool.num_free} of {pool.num_usable} are free: either one request of max_model_len="
            f"{self.max_model_len} does not fit into the pool, which check_fits must refuse at "
            "start-up, or blocks have leaked."
        )
