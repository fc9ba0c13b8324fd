"""Random requests, steps, aborts and stops on a pool so small that preemption never ends.

The device is simulated: a slot stores the whole prefix that its keys and values would encode, and
tokens are drawn from what the slots say. Whatever prefix sharing, eviction, chunking or preemption
got wrong would change an output, which must equal that of a plain loop.
"""

import zlib

import numpy as np
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
from paged.scheduler.output import FinishReason, ModelRunnerOutput, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.prefix_cache import NONE_HASH
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.scheduler import Scheduler

BLOCK_SIZE = 4
VOCABULARY = 3
EOS = 2

type Content = tuple[str | None, tuple[int, ...]]
"""What the keys and values of a token depend on: the salt's tenant and all tokens so far."""


def next_token(prefix: tuple[int, ...]) -> int:
    """A language model: deterministic, and sensitive to every token."""
    return zlib.crc32(bytes(prefix)) % VOCABULARY


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


class FakeDevice:
    """KV slots that remember what was written, and sampling that reads them."""

    def __init__(self, num_blocks: int) -> None:
        self._slots: list[Content | None] = [None] * (num_blocks * BLOCK_SIZE)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        # As in the model: the whole batch writes before anything is read.
        written: set[int] = set()
        for row in output.scheduled:
            for position in range(row.start, row.start + row.num_tokens):
                slot = self._slot(row.request, position)
                assert slot >= BLOCK_SIZE, "written into the null block"
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self._slots[slot] = self._content(row.request, position + 1)
        tokens = [self._sample(row.request, row.start + row.num_tokens) for row in output.scheduled]
        return ModelRunnerOutput(np.array(tokens, np.int32))

    def _sample(self, request: Request, num_context: int) -> int:
        context = [self._slots[self._slot(request, position)] for position in range(num_context)]
        assert context == [self._content(request, length + 1) for length in range(num_context)]
        assert context[-1] is not None
        return next_token(context[-1][1])

    def _slot(self, request: Request, position: int) -> int:
        block, offset = divmod(position, BLOCK_SIZE)
        return request.block_ids[block] * BLOCK_SIZE + offset

    def _content(self, request: Request, length: int) -> Content:
        return request.cache_salt, tuple(request.tokens(0, length))


def make_prompt(family: int, length: int, tail: list[int]) -> tuple[int, ...]:
    """Families of common prefixes that branch near the end: hits, and blocks that differ."""
    return (family, *[0] * length, *tail)


# Short prompts with long outputs: many enter and then outgrow the pool together.
PROMPTS = st.tuples(
    st.builds(
        make_prompt,
        st.integers(0, 1),
        st.integers(4, 9) | st.integers(0, 50),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    ),
    st.integers(1, 30) | st.integers(20, 30),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([None, None, "a"]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 14),
        max_num_seqs=st.sampled_from([4, 6, 3, 2, 1]),
        extra_budget=st.integers(0, 30),
        threshold=st.sampled_from([0, 0, 3]),
        enable_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, max_num_seqs, extra_budget, threshold, enable_caching):
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, enable_caching)
        self.scheduler = Scheduler(
            pool=self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            # One request can just fill the pool.
            max_model_len=self.pool.num_usable * BLOCK_SIZE,
            long_prefill_token_threshold=threshold,
        )
        self.device = FakeDevice(num_blocks)
        self.requests: list[Request] = []
        self.ended_from_outside: set[str] = set()
        self.parents: dict[bytes, bytes] = {}
        self.queries = self.hits = 0

    @rule(workload=st.lists(PROMPTS, min_size=2, max_size=6))
    def add(self, workload):
        for prompt, max_tokens, stops, salt in workload:
            request = Request(
                f"r{len(self.requests)}",
                prompt[: self.scheduler.max_model_len - 1],
                SamplingParams(),
                max_tokens,
                eos_token_id=EOS if stops else None,
                cache_salt=salt,
            )
            self.requests.append(request)
            self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps):
        for _ in range(num_steps):
            if self.scheduler.num_unfinished:
                self.update(self.schedule())

    @precondition(lambda self: self.scheduler.num_unfinished)
    @rule(choice=st.integers(0))
    def abort_during_a_step(self, choice):
        output = self.schedule()
        # The device has the step, the caller hangs up.
        result = self.device.run(output)
        self.end(choice, FinishReason.ABORT)
        self.scheduler.update(output, result)

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

    @rule()
    def reset_prefix_cache(self):
        assert self.pool.reset_prefix_cache() == (self.scheduler.num_running == 0)

    def schedule(self) -> SchedulerOutput:
        scheduler = self.scheduler
        waiting, running = scheduler.waiting, scheduler.running
        output = scheduler.schedule()
        assert output.scheduled, "requests exist and nothing moves"
        rows = output.scheduled
        assert output.num_tokens == sum(row.num_tokens for row in rows)
        assert output.num_tokens <= scheduler.max_num_batched_tokens
        assert len({row.request.request_id for row in rows}) == len(rows)
        is_longer = [row.num_tokens > 1 for row in rows]
        assert is_longer == sorted(is_longer)
        # First come, first served: victims are the last, and nobody overtakes.
        num_victims, num_kept = len(output.preempted), len(running) - len(output.preempted)
        assert output.preempted == running[num_kept:]
        admitted = scheduler.running[num_kept:]
        assert scheduler.running[:num_kept] == running[:num_kept]
        assert admitted == waiting[: len(admitted)]
        assert scheduler.waiting == output.preempted + waiting[len(admitted) :]
        assert not (num_victims and admitted)
        return output

    def update(self, output: SchedulerOutput) -> None:
        sampling = [row.request for row in output.scheduled if row.samples]
        lengths = [len(request.output_token_ids) for request in sampling]
        updates = self.scheduler.update(output, self.device.run(output))
        assert [update.request for update in updates] == sampling
        assert [len(request.output_token_ids) for request in sampling] == [n + 1 for n in lengths]

    @invariant()
    def block_tables_and_pool_agree(self):
        owners: dict[int, list[tuple[Request, int]]] = {}
        for request in self.requests:
            assert (request.status is RequestStatus.RUNNING) or not request.block_ids
            for index, block_id in enumerate(request.block_ids):
                owners.setdefault(block_id, []).append((request, index))
        for block_id in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == len(owners.get(block_id, ()))
        free = self.pool.free_order()
        assert sorted([*free, *owners]) == list(range(1, self.pool.num_blocks))
        assert len(free) == self.pool.num_free
        for block_id, shares in owners.items():
            if len(shares) > 1:
                hashes = {request.block_hashes[index] for request, index in shares}
                assert hashes == {self.pool.block_hash(block_id)}

    @invariant()
    def cached_blocks_are_closed_under_parent(self):
        # Otherwise the pool would hold content that no lookup can reach.
        for request in self.requests:
            chain = [NONE_HASH, *request.block_hashes]
            self.parents |= dict(zip(chain[1:], chain[:-1], strict=True))
        for block_id in range(1, self.pool.num_blocks):
            block_hash = self.pool.block_hash(block_id)
            if block_hash is not None and self.parents[block_hash] != NONE_HASH:
                assert self.pool.lookup(self.parents[block_hash]) is not None

    @invariant()
    def every_request_is_counted_once(self):
        queries, hits = self.scheduler.take_prefix_stats()
        self.queries, self.hits = self.queries + queries, self.hits + hits
        seen = [r for r in self.requests if r.num_cached_tokens >= 0]
        assert self.hits == sum(request.num_cached_tokens for request in seen)
        if self.pool.enable_caching:
            assert self.queries == sum(request.num_prompt_tokens for request in seen)
        assert self.scheduler.num_running <= self.scheduler.max_num_seqs

    def teardown(self):
        num_steps = 0
        while self.scheduler.num_unfinished:
            self.update(self.schedule())
            num_steps += 1
            assert num_steps < 5_000, "some request starves"
        self.block_tables_and_pool_agree()
        assert self.pool.num_free == self.pool.num_usable
        for request in self.requests:
            output, reason = generate(request, self.scheduler.max_model_len)
            if request.request_id in self.ended_from_outside:
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (output, reason)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, derandomize=True
)
