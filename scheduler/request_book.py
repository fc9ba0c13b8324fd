"""`RequestBook`: where every unfinished request stands, and the moves between those places.

A request *waits* without blocks, *loads* while a lower tier fills its first blocks, is *held* while
it waits with blocks, or *runs*. Knows what each move means for blocks, batch rows and the eviction
policy; which move is right is the scheduler's decision.
"""

from collections.abc import Iterator, Sequence

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.kv_manager import KVManager, PrefixHit
from paged.scheduler.lora_slots import LoRASlots
from paged.scheduler.output import FinishReason
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.request_queue import RequestQueue
from paged.scheduler.restoring import Restorer


class RequestBook:
    """Requests by the place where they stand (mutable).

    Args:
      kv: their block tables.
      pool: the blocks; its policy hears who waits for what.
      restorer: loads of those that wait for a lower tier.
      queue: order of those that wait without blocks.
      loras: places of their adapters; whoever has blocks has one.
      max_num_seqs: batch rows.

    Attributes:
      waiting: without blocks, next to be admitted first.
      held: with blocks but in no step yet: forks, and those whose prefix was restored.
      running: in order of admission. A dict gives the last one and removes any one in O(1).
      num_preemptions: of running requests.
      num_discarded_tokens: computed tokens that these have thrown away.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        pool: BlockPool,
        restorer: Restorer,
        queue: RequestQueue,
        loras: LoRASlots,
        max_num_seqs: int,
    ) -> None:
        self.waiting = queue
        self.held: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_discarded_tokens = 0
        self._kv = kv
        self._pool = pool
        self._restorer = restorer
        self._loras = loras
        self._by_id: dict[str, Request] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __contains__(self, request: Request) -> bool:
        return self._by_id.get(request.request_id) is request

    def get(self, request_id: str) -> Request | None:
        """Return the unfinished request of this id."""
        return self._by_id.get(request_id)

    @property
    def num_admitted(self) -> int:
        """Requests that run or are about to: held and loading ones."""
        return len(self.running) + len(self.held) + self._restorer.num_loading

    @property
    def num_waiting(self) -> int:
        """Requests that are not running."""
        return len(self._by_id) - len(self.running)

    def register(self, request: Request) -> None:
        """Take in a new request, which stands nowhere yet."""
        self._kv.extend_hashes(request)
        request.block_tables = [[] for _ in range(self._kv.num_groups)]
        request.status = RequestStatus.WAITING
        self._by_id[request.request_id] = request
        self._loras.register(request)

    def enqueue(self, request: Request, *, in_front: bool = False) -> None:
        """Let a request without blocks wait."""
        if in_front:
            self.waiting.push_front(request)
        else:
            self.waiting.push(request)
        self._pool.policy.expect(request.request_id, request.block_hashes)

    def leave_queue(self, request: Request, hit: PrefixHit | None) -> None:
        """Take an admitted request out of the queue; `hit` is what it was admitted with."""
        self._dequeue(request)
        self._loras.acquire(request)
        if hit is not None:
            self._pool.policy.lookup(request.block_hashes, hit.num_blocks)

    def hold(self, request: Request) -> None:
        """Let a request with blocks wait for its first step."""
        self.held[request.request_id] = request
        self._loras.acquire(request)

    def start(self, request: Request) -> None:
        """Let a request with blocks run."""
        self.held.pop(request.request_id, None)
        self.running[request.request_id] = request
        request.batch_row = self._free_rows.pop()
        request.status = RequestStatus.RUNNING

    def preempt(self, victim: Request) -> None:
        """Take a running request's blocks; its output stays, its KV is recomputed."""
        self._stop(victim)
        self.num_preemptions += 1
        self.num_discarded_tokens += victim.num_computed_tokens
        self._kv.free(victim)
        self._loras.release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.enqueue(victim, in_front=True)

    def send_back(self) -> Request | None:
        """Take the blocks from who got them last and has done nothing with them but a copy.

        Returns: the request, which waits again; None if nobody is held or loading.
        """
        if self._restorer.num_loading:
            request = self._restorer.cancel_last()
        elif self.held:
            _, request = self.held.popitem()
            self._restorer.cancel(request)
        else:
            return None
        self._kv.free(request)
        self._loras.release(request)
        self.enqueue(request, in_front=True)
        return request

    def preempt_everybody(self) -> None:
        """Let all requests wait without blocks, in the order in which they were admitted."""
        while self.send_back() is not None:
            pass
        for victim in reversed(list(self.running.values())):
            self.preempt(victim)

    def end(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """Take a request out, wherever it stands, and free its blocks."""
        request_id = request.request_id
        del self._by_id[request_id]
        was_loading = self._restorer.cancel(request)
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
        elif self.held.pop(request_id, None) is None and not was_loading:
            self._dequeue(request)
        self._kv.free(request)
        self._loras.release(request)
        self._loras.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def rehash_waiting(self) -> None:
        """Name the blocks of all waiting requests anew."""
        for request in self.waiting:
            self._pool.policy.forget(request.request_id)
            request.block_hashes.clear()
            self._kv.extend_hashes(request)
            self._pool.policy.expect(request.request_id, request.block_hashes)

    def pass_over(self, request: Request) -> None:
        """Take the head of the queue aside, until `put_back`."""
        self.waiting.remove(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return those that were passed over to the front of the queue, in their order."""
        for request in reversed(requests):
            self.waiting.push_front(request)

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self._pool.policy.forget(request.request_id)

    def _stop(self, request: Request) -> None:
        del self.running[request.request_id]
        self._free_rows.append(request.batch_row)
        request.batch_row = -1
