"""`StepChooser`: who takes part in a step, who is admitted to it, and who gives up blocks for it.

Those who run come first, then those who hold blocks already, then the queue; and nobody new while
blocks are short.
"""

from collections.abc import Callable, Set

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.lora_slots import LoRASlots
from paged.scheduler.prefill_limits import PartialPrefills, PrefillLimits
from paged.scheduler.prefix_stats import HitCounter
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.request_book import RequestBook
from paged.scheduler.request_queue import urgency
from paged.scheduler.restoring import Restorer
from paged.scheduler.sample_leaders import SampleLeaders
from paged.scheduler.step_plan import StepPlan


class StepChooser:
    """Decides one step after another (mutable, by what it is made of).

    Args:
      book: where the requests stand.
      kv: their block tables.
      pool: the blocks.
      restorer: prefixes on their way from a lower tier.
      loras: places of adapters.
      leaders: samples whose prompts others share.
      hits: counts what was found in the prefix cache.
      prefill_limits, max_model_len, enable_chunked_prefill, is_by_priority, clock: as
        `Scheduler` has them.
    """

    def __init__(
        self,
        *,
        book: RequestBook,
        kv: KVManager,
        pool: BlockPool,
        restorer: Restorer,
        loras: LoRASlots,
        leaders: SampleLeaders,
        hits: HitCounter,
        prefill_limits: PrefillLimits,
        max_model_len: int,
        enable_chunked_prefill: bool,
        is_by_priority: bool,
        clock: Callable[[], float],
    ) -> None:
        self._book = book
        self._kv = kv
        self._pool = pool
        self._restorer = restorer
        self._loras = loras
        self._leaders = leaders
        self._hits = hits
        self._prefill_limits = prefill_limits
        self._max_model_len = max_model_len
        self._enable_chunked_prefill = enable_chunked_prefill
        self._is_by_priority = is_by_priority
        self._clock = clock

    def choose(self, budget: int, max_num_seqs: int) -> tuple[StepPlan, list[object]]:
        """Return a step, and what is to be written to the device before it runs.

        Args:
          budget: most tokens of it.
          max_num_seqs: most requests that run in it.
        """
        step = StepPlan(budget, self._prefill_limits.request_cap(budget, len(self._book)))
        restores = self._collect_restored()
        ready_parents = self._leaders.ready_parents()
        self._schedule_running(step)
        # Blocks that a preemption has freed are for those who already run.
        if not step.is_short_of_blocks:
            self._schedule_held(step, max_num_seqs)
        if not step.is_short_of_blocks:
            self._schedule_waiting(step, ready_parents, max_num_seqs)
        return step, restores

    def _schedule_running(self, step: StepPlan) -> None:
        block_size = self._pool.block_size
        is_plain = self._kv.is_plain
        running = list(self._book.running.values())
        index = 0
        while index < len(running) and step.budget > 0:
            if is_plain and not step.is_short_of_blocks:
                index = step.add_decodes(running, index, self._kv, block_size)
                if index == len(running) or step.budget <= 0:
                    return
            self._schedule_one(running[index], step)
            index += 1

    def _schedule_one(self, request: Request, step: StepPlan) -> None:
        """Schedule what a running request has left, if it still runs and need not wait."""
        if request.status is not RequestStatus.RUNNING:
            return  # lost its blocks to one before it
        num_tokens = request.num_tokens + request.num_in_flight - request.num_computed_tokens
        if num_tokens <= 0 or (request.num_in_flight and request.must_wait_for_sample):
            return
        num_tokens = step.clip(num_tokens)
        while not self._kv.extend(request, num_tokens):
            if self._preempt_somebody(step) is request:
                return
        step.add(request, num_tokens)

    def _preempt_somebody(self, step: StepPlan) -> Request:
        """Take all blocks from the request that can best spare them, and return it."""
        step.is_short_of_blocks = True
        sent_back = self._book.send_back()
        if sent_back is not None:
            return sent_back
        running = self._book.running
        if self._is_by_priority:
            victim = max(running.values(), key=urgency)
            row = step.remove(victim)
            if row is not None:
                # Its blocks of this step were published and will never be computed.
                self._kv.retract(victim, row.start // self._pool.block_size)
                victim.num_computed_tokens = row.start
        else:
            # Admitted last, hence not yet in this step: the loop goes by order of admission.
            victim = next(reversed(running.values()))
        self._book.preempt(victim)
        # Victims come last first, so putting each in front keeps their order.
        step.preempted.insert(0, victim)
        return victim

    def _collect_restored(self) -> list[object]:
        """Let requests whose prefixes have arrived go on; return what has to be written first."""
        if not self._restorer.num_loading:
            return []
        requests, payloads = self._restorer.collect()
        for request in requests:
            self._book.hold(request)
        return payloads

    def _schedule_held(self, step: StepPlan, max_num_seqs: int) -> None:
        held, running = self._book.held, self._book.running
        while held and step.budget > 0 and len(running) < max_num_seqs:
            request = next(iter(held.values()))
            num_tokens = step.clip(request.num_tokens - request.num_computed_tokens)
            if self._kv.extend(request, num_tokens):
                self._start(request, step, num_tokens)
            elif running or len(held) == 1:
                return
            else:
                # Nobody will free a block: what the last ones hold has to do.
                self._book.send_back()

    def _schedule_waiting(self, step: StepPlan, ready_parents: Set[str], max_num_seqs: int) -> None:
        partial: PartialPrefills | None = None
        if self._prefill_limits.limits_admission:
            partial = self._prefill_limits.count(self._book.running.values(), self._max_model_len)
        book, waiting = self._book, self._book.waiting
        passed_over: list[Request] = []
        num_blocked = 0  # of those, for want of a slot for their adapter
        while step.budget > 0 and waiting and book.num_admitted < max_num_seqs:
            request = waiting.peek()
            if request.num_in_flight:
                break  # preempted, and its last sample has not come back yet
            leader = self._leaders.leader_of(request)
            if leader is not None and request.parent_id not in ready_parents:
                book.pass_over(request)
                passed_over.append(request)
                continue
            if not self._loras.can_admit(request):
                if num_blocked + len(waiting) == self._loras.num_blocked:
                    break  # all that are left
                book.pass_over(request)
                passed_over.append(request)
                num_blocked += 1
                continue
            if leader is not None and self._kv.can_fork(leader, request):
                if not self._admit_fork(request, leader, step):
                    break
                continue
            hit = self._kv.find_hit(request)
            if self._restorer.start(request, hit):
                book.leave_queue(request, hit)
                continue
            remaining = request.num_tokens - hit.num_blocks * self._pool.block_size
            if not self._enable_chunked_prefill and remaining > step.budget:
                break
            num_tokens = step.clip(remaining)
            if partial is not None and num_tokens < remaining:
                if not partial.has_room_for(request):
                    book.pass_over(request)
                    passed_over.append(request)
                    continue
                partial.add(request)
            # No request overtakes the head of the queue, or a long prompt might starve.
            if not self._kv.admit(request, num_tokens, hit):
                break
            book.leave_queue(request, hit)
            self._start(request, step, num_tokens)
        book.put_back(passed_over)

    def _start(self, request: Request, step: StepPlan, num_tokens: int) -> None:
        """Make a request that holds blocks a running one and schedule its first tokens."""
        self._book.start(request)
        if request.num_cached_tokens < 0:
            self._hits.count(request)
            request.scheduled_time = self._clock()
        self._leaders.on_start(request)
        step.add(request, num_tokens)

    def _admit_fork(self, request: Request, leader: Request, step: StepPlan) -> bool:
        """Admit a further sample of a prompt that is computed; say whether there was room."""
        self._kv.fork(leader, request)
        num_tokens = step.clip(request.num_tokens - request.num_computed_tokens)
        if not self._kv.extend(request, num_tokens):
            self._kv.free(request)
            return False
        self._book.leave_queue(request, None)
        self._start(request, step, num_tokens)
        return True
