"""Random workloads on a pool so small that preemption never ends, under every combination of
policies, cache groups, tiers and asynchronous steps.

The device is simulated: a slot stores the whole prefix that its keys and values would encode, and
every step checks all it reads. Whatever sharing, eviction, chunking, preemption, copying or
planning ahead got wrong would fail there or change an output, which must equal that of a plain
loop.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.eviction.policies import POLICIES, make_policy
from paged.scheduler.output import FinishReason, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.prefix_cache import PrefixHasher
from paged.scheduler.request import CacheMode, Request, RequestStatus
from paged.scheduler.request_queue import urgency
from paged.scheduler.scheduler import Scheduler
from tests.scheduler.fake_device import VOCABULARY, Content, FakeDevice, FakeTiers, next_token

BLOCK_SIZE = 4
EOS = 2
NUM_STEPS = 0  # of all examples together


def generate(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request should produce, by a loop without cache, batch or memory limit."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        output.append(next_token(tuple(tokens)))
        tokens.append(output[-1])
        if output[-1] == request.eos_token_id:
            return output, FinishReason.STOP
        if len(output) == request.max_tokens or len(tokens) == max_model_len:
            return output, FinishReason.LENGTH


def make_prompt(family: int, length: int, tail: list[int]) -> tuple[int, ...]:
    """Families of common prefixes that branch near the end: hits, and blocks that differ."""
    return (family, *[0] * length, *tail)


# Short prompts with long outputs: many enter and then outgrow the pool together.
WORKLOAD = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            make_prompt,
            st.integers(0, 1),
            st.integers(4, 9) | st.integers(0, 50),
            st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        ),
        "max_tokens": st.integers(1, 30) | st.integers(20, 30),
        "stops": st.sampled_from([False, False, False, True]),
        "salt": st.sampled_from([None, None, "a"]),
        "num_samples": st.sampled_from([1, 1, 1, 3]),
        "priority": st.integers(0, 2),
        "cache_mode": st.sampled_from(
            [CacheMode.DEFAULT] * 4 + [CacheMode.NO_STORE, CacheMode.PIN]
        ),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 14),
        max_num_seqs=st.sampled_from([4, 6, 3, 2, 1]),
        extra_budget=st.integers(0, 30),
        threshold=st.sampled_from([0, 0, 3, 9]),
        limits=st.sampled_from([(None, None), (None, None), (1, None), (2, 1)]),
        enable_caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "priority"]),
        eviction=st.sampled_from(POLICIES),
        windows=st.sampled_from([(None,), (None,), (None, 6), (None, 3, 9)]),
        tiers=st.none()
        | st.builds(
            FakeTiers,
            st.integers(1, 20),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.sampled_from([0, 0, 1, 9]), min_size=1, max_size=4),
            st.integers(1, 9),
        ),
        is_async=st.booleans(),
    )
    def start(
        self,
        num_blocks,
        max_num_seqs,
        extra_budget,
        threshold,
        limits,
        enable_caching,
        policy,
        eviction,
        windows,
        tiers,
        is_async,
    ):
        if len(windows) > 1:
            tiers = None
            num_blocks *= len(windows)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, enable_caching, policy=make_policy(eviction))
        self.policy = policy
        self.is_plain = limits == (None, None) and tiers is None
        self.scheduler = Scheduler(
            pool=self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            # One request can just fill the pool.
            max_model_len=self.pool.num_usable // len(windows) * BLOCK_SIZE,
            policy=policy,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=limits[0],
            max_long_partial_prefills=limits[1],
            windows=windows,
            tiers=tiers,
            clock=lambda: float(NUM_STEPS),
        )
        self.device = FakeDevice(num_blocks, BLOCK_SIZE, windows, tiers)
        self.is_async = is_async
        self.pending = None  # dispatched, not updated
        self.requests: list[Request] = []
        self.ended_from_outside: set[str] = set()
        self.parents: dict[bytes, bytes] = {}
        self.queries = self.hits = 0
        self.names: dict[Content, bytes] = {}

    @rule(workload=st.lists(WORKLOAD, min_size=1, max_size=4))
    def add(self, workload):
        for spec in workload:
            parent_id = f"p{len(self.requests)}"
            for index in range(spec["num_samples"]):
                request = Request(
                    f"r{len(self.requests)}",
                    spec["prompt"][: self.scheduler.max_model_len - 1],
                    SamplingParams(),
                    spec["max_tokens"],
                    eos_token_id=EOS if spec["stops"] else None,
                    cache_salt=spec["salt"],
                    parent_id=parent_id,
                    index=index,
                    num_samples=spec["num_samples"],
                    priority=spec["priority"],
                    cache_mode=spec["cache_mode"],
                    arrival_time=float(len(self.requests)),
                )
                self.requests.append(request)
                self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.num_running)
    @rule(choice=st.integers(0), max_tokens=st.integers(1, 20))
    def fork(self, choice, max_tokens):
        running = self.scheduler.running
        parent = running[choice % len(running)]
        if parent.num_computed_tokens > parent.num_tokens or (
            parent.num_tokens >= self.scheduler.max_model_len
        ):
            return  # what it has computed is not known yet, or nothing can follow
        child = Request(
            f"r{len(self.requests)}",
            tuple(parent.tokens(0, parent.num_tokens)),
            SamplingParams(),
            max_tokens,
            cache_salt=parent.cache_salt,
            arrival_time=float(len(self.requests)),
        )
        self.requests.append(child)
        self.scheduler.fork(parent, child)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps):
        for _ in range(num_steps):
            if self.scheduler.num_unfinished:
                self.step()

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(choice=st.integers(0))
    def abort_during_a_step(self, choice):
        output = self.schedule()
        # The device has the step, the caller hangs up.
        result = self.device.run(output)
        self.deliver()
        self.end(choice, FinishReason.ABORT)
        self.pending = output, result
        if not self.is_async:
            self.deliver()

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, choice, reason):
        request = self.requests[choice % len(self.requests)]
        if not request.is_finished:
            self.ended_from_outside.add(request.request_id)
        if reason is FinishReason.ABORT:
            self.scheduler.abort([request.request_id, "unknown"])
        else:
            self.scheduler.finish(request, reason, "stop string")
        assert request.is_finished

    @rule(preempt=st.sampled_from([False, False, False, True]))
    def reset_prefix_cache(self, preempt):
        is_free = not any(any(r.block_tables) for r in self.requests)
        done = self.scheduler.reset_prefix_cache(reset_running_requests=preempt)
        assert done == (preempt or is_free)
        if done:
            assert self.pool.num_free == self.pool.num_usable

    @rule(blocks=st.lists(st.integers(0, 100), max_size=3))
    def evict(self, blocks):
        self.pool.evict(1 + block % self.pool.num_usable for block in blocks)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule()
    def change_the_weights(self):
        self.deliver()
        self.scheduler.advance_weights_epoch()
        self.device.weights_epoch += 1
        self.parents.clear()

    def step(self) -> None:
        output = self.schedule()
        result = self.device.run(output)
        if self.is_async:
            self.deliver()
        self.pending = output, result
        if not self.is_async:
            self.deliver()

    def schedule(self) -> SchedulerOutput:
        global NUM_STEPS
        NUM_STEPS += 1
        scheduler = self.scheduler
        waiting, running = scheduler.waiting, scheduler.running
        is_under_way = self.pending is not None or scheduler.is_waiting_for_tiers
        output = scheduler.schedule()
        rows = output.scheduled
        assert rows or is_under_way or scheduler.is_waiting_for_tiers, "nothing moves"
        assert output.num_tokens == sum(row.num_tokens for row in rows)
        assert output.num_tokens <= scheduler.max_num_batched_tokens
        assert scheduler.num_running <= scheduler.max_num_seqs
        assert len({row.request.request_id for row in rows}) == len(rows)
        assert len({row.request.batch_row for row in rows}) == len(rows)
        is_longer = [row.num_tokens > 1 for row in rows]
        assert is_longer == sorted(is_longer)
        self.check_order(output, waiting, running)
        return output

    def check_order(self, output, waiting, running) -> None:
        """First come, first served, or by priority: victims are the last, and nobody overtakes."""
        scheduler = self.scheduler
        if self.policy == "priority":
            kept = [r for r in running if r.status is RequestStatus.RUNNING]
            for victim in output.preempted:
                assert all(urgency(victim) > urgency(request) for request in kept)
            return
        num_kept = len(running) - len(output.preempted)
        assert output.preempted == running[num_kept:]
        assert scheduler.running[:num_kept] == running[:num_kept]
        if self.is_plain and not any(r.num_samples > 1 for r in waiting):
            admitted = [r for r in scheduler.running[num_kept:] if r in waiting]
            assert admitted == list(waiting[: len(admitted)])
            assert not (output.preempted and admitted)

    def deliver(self) -> None:
        """Hand the samples of the step in flight to the scheduler."""
        if self.pending is None:
            return
        (output, result), self.pending = self.pending, None
        sampling = [r.request for r in output.scheduled if r.samples and not r.request.is_finished]
        lengths = [len(request.output_token_ids) for request in sampling]
        updates = self.scheduler.update(output, result)
        assert [update.request for update in updates] == sampling
        assert [len(request.output_token_ids) for request in sampling] == [n + 1 for n in lengths]

    @invariant()
    def block_tables_and_pool_agree(self):
        owners: dict[int, list[tuple[Request, int]]] = {}
        for request in self.requests:
            if request.status not in (RequestStatus.RUNNING, RequestStatus.LOADING):
                is_holding = request in self.scheduler._book.held.values()
                assert is_holding or not any(request.block_tables)
            for table in request.block_tables:
                for index, block_id in enumerate(table):
                    if block_id:
                        owners.setdefault(block_id, []).append((request, index))
        pins = self.pool._pins
        for block_id in range(1, self.pool.num_blocks):
            count = len(owners.get(block_id, ())) + pins.get(block_id, 0)
            assert self.pool.ref_count(block_id) == count
        free = self.pool.free_order()
        assert sorted([*free, *{*owners, *pins}]) == list(range(1, self.pool.num_blocks))
        assert len(free) == self.pool.num_free
        for block_id, shares in owners.items():
            block_hash = self.pool.block_hash(block_id)
            if len(shares) > 1 and block_hash is not None:
                hashes = {request.block_hashes[index] for request, index in shares}
                assert hashes == {block_hash[:32]}

    @invariant()
    def cached_blocks_are_closed_under_parent(self):
        # Otherwise the pool would hold content that no lookup can reach.
        if len(self.device.windows) > 1:
            return
        root = self.scheduler._kv.hasher.root
        for request in self.requests:
            if not request.is_finished:
                chain = [root, *request.block_hashes]
                self.parents |= dict(zip(chain[1:], chain[:-1], strict=True))
        for block_id in range(1, self.pool.num_blocks):
            block_hash = self.pool.block_hash(block_id)
            if block_hash in self.parents and self.parents[block_hash] != root:
                assert self.pool.lookup(self.parents[block_hash]) is not None

    @invariant()
    def cached_blocks_hold_what_their_names_say(self):
        for block_id in range(1, self.pool.num_blocks):
            block_hash = self.pool.block_hash(block_id)
            if block_hash is not None:
                content = self.device.content(block_id)
                assert content is not None, "published and never computed"
                assert block_hash[:32] == self.name_of(content)

    def name_of(self, content: Content) -> bytes:
        if content not in self.names:
            epoch, salt, tokens = content
            request = Request("", tokens, SamplingParams(), 1, cache_salt=salt)
            PrefixHasher(epoch=epoch).extend(request, BLOCK_SIZE)
            self.names[content] = request.block_hashes[-1]
        return self.names[content]

    @invariant()
    def every_request_is_counted_once(self):
        stats = self.scheduler.take_prefix_stats()
        self.queries += stats.queries
        self.hits += stats.hits + sum(stats.external_hits.values())
        if self.pool.enable_caching:
            seen = [request for request in self.requests if request.num_cached_tokens >= 0]
            assert self.hits == sum(request.num_cached_tokens for request in seen)
            assert self.queries == sum(request.num_prompt_tokens for request in seen)

    def teardown(self):
        num_steps = 0
        while self.scheduler.num_unfinished or self.pending is not None:
            self.step() if self.scheduler.num_unfinished else self.deliver()
            num_steps += 1
            assert num_steps < 5_000, "some request starves"
        self.block_tables_and_pool_agree()
        assert self.pool.num_free == self.pool.num_usable - self.pool.num_pinned
        for request in self.requests:
            output, reason = generate(request, self.scheduler.max_model_len)
            if request.request_id in self.ended_from_outside:
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (output, reason)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


def test_the_machine_has_taken_its_steps():
    assert NUM_STEPS == 0 or NUM_STEPS >= 10_000
