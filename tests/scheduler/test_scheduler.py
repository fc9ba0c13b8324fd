"""`Scheduler`: budgets, order, preemption, stops, and the way back of every block."""

import subprocess
import sys

import numpy as np
import pytest
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.errors import CapacityError
from paged.scheduler.output import FinishReason, ModelRunnerOutput, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.scheduler import RequestUpdate, Scheduler

BLOCK_SIZE = 16
TOKEN = 7


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(request_id, num_tokens, max_tokens=50, **settings) -> Request:
    # Every request has tokens of its own, so that nothing is shared by accident.
    first = 1000 * sum(request_id.encode())
    prompt = tuple(range(first, first + num_tokens))
    return Request(request_id, prompt, SamplingParams(), max_tokens, **settings)


def make_scheduler(*, num_blocks=1001, **settings) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    return Scheduler(pool=BlockPool(num_blocks, BLOCK_SIZE), **limits | settings)


def pool_of(scheduler: Scheduler) -> BlockPool:
    return scheduler._pool


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def deliver(scheduler: Scheduler, output: SchedulerOutput, token=TOKEN) -> list[RequestUpdate]:
    tokens = np.full(len(output.scheduled), token, np.int32)
    return scheduler.update(output, ModelRunnerOutput(tokens))


def counts(output: SchedulerOutput) -> dict[str, int]:
    assert output.num_tokens == sum(row.num_tokens for row in output.scheduled)
    return {row.request.request_id: row.num_tokens for row in output.scheduled}


def step(scheduler: Scheduler, token=TOKEN) -> dict[str, int]:
    output = scheduler.schedule()
    deliver(scheduler, output, token)
    return counts(output)


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


# One rule for prompts, chunks and decodes.
def test_long_prompt_is_computed_in_chunks_and_samples_with_the_last():
    scheduler = make_scheduler()
    request = make_request("a", 5033)
    add(scheduler, request)
    seen = []
    for _ in range(5):
        output = scheduler.schedule()
        updates = deliver(scheduler, output)
        seen.append((output.num_tokens, output.scheduled[0].samples, len(updates)))
    assert seen == [(2048, False, 0), (2048, False, 0), *[(937, True, 1)], *[(1, True, 1)] * 2]
    assert request.output_token_ids == [TOKEN] * 3


@pytest.mark.parametrize(
    ("threshold", "prompt_chunks"),
    [(0, [2045, 2045, 910]), (512, [512] * 9 + [392])],
)
def test_new_prompt_gets_what_the_decodes_leave_of_the_budget(threshold, prompt_chunks):
    scheduler = make_scheduler(long_prefill_token_threshold=threshold)
    add(scheduler, *[make_request(i, 10) for i in "abc"])
    step(scheduler)
    add(scheduler, make_request("p", 5000))
    decodes = dict.fromkeys("abc", 1)
    for chunk in [*prompt_chunks, 1]:
        assert step(scheduler) == decodes | {"p": chunk}


def test_long_prefill_threshold_does_not_slow_the_only_request():
    scheduler = make_scheduler(long_prefill_token_threshold=512)
    add(scheduler, make_request("p", 5033))
    assert [step(scheduler) for _ in range(3)] == [{"p": 2048}, {"p": 2048}, {"p": 937}]


def test_second_prompt_enters_with_the_rest_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=150)
    add(scheduler, make_request("a", 100), make_request("b", 100))
    assert [step(scheduler) for _ in range(3)] == [
        {"a": 100, "b": 50},
        {"a": 1, "b": 50},
        {"a": 1, "b": 1},
    ]


def test_without_chunked_prefill_a_prompt_enters_whole():
    scheduler = make_scheduler(
        max_num_batched_tokens=150, max_model_len=150, enable_chunked_prefill=False
    )
    add(scheduler, make_request("a", 100), make_request("b", 100))
    assert [step(scheduler) for _ in range(2)] == [{"a": 100}, {"a": 1, "b": 100}]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(i, 10, max_tokens=n) for i, n in zip("abc", (2, 9, 9), strict=True)]
    add(scheduler, *requests)
    assert step(scheduler) == {"a": 10, "b": 10}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"b": 1, "c": 10}


def test_samples_of_one_prompt_share_its_full_blocks_within_a_step():
    scheduler = make_scheduler()
    children = [Request(f"{i}_a", tuple(range(100)), SamplingParams(), 5) for i in range(2)]
    add(scheduler, *children)
    assert step(scheduler) == {"0_a": 100, "1_a": 4}
    assert children[0].block_ids[:6] == children[1].block_ids[:6]


def test_single_token_rows_come_first_and_keep_admission_order():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, make_request("a", 100), make_request("b", 20))
    assert list(step(scheduler)) == ["a"]
    add(scheduler, make_request("c", 1))
    assert list(step(scheduler).items()) == [("c", 1), ("a", 36), ("b", 20)]
    assert list(step(scheduler)) == ["a", "b", "c"]


def test_budget_of_one_step_is_spent_in_admission_order():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, make_request("a", 12), make_request("b", 3), make_request("c", 12))
    assert step(scheduler) == {"a": 8}
    assert step(scheduler) == {"a": 4, "b": 3, "c": 1}


def test_request_whose_token_is_still_on_the_device_does_not_hold_up_the_others():
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, make_request("a", 5), make_request("b", 30))
    first = scheduler.schedule()
    assert counts(first) == {"a": 5, "b": 15}
    second = scheduler.schedule()
    assert counts(second) == {"b": 15}
    assert ids(update.request for update in deliver(scheduler, first)) == ["a"]
    assert ids(update.request for update in deliver(scheduler, second)) == ["b"]


# What does not fit waits.
def test_head_of_the_queue_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=11, max_model_len=160)
    add(scheduler, make_request("a", 80), make_request("b", 100), make_request("c", 16))
    assert step(scheduler) == {"a": 80}
    assert step(scheduler) == {"a": 1}
    assert ids(scheduler.waiting) == ["b", "c"]
    scheduler.abort(["b"])
    assert step(scheduler) == {"a": 1, "c": 16}


def test_prompt_enters_only_if_all_of_it_would_fit():
    scheduler = make_scheduler(num_blocks=11, max_model_len=160, max_num_batched_tokens=16)
    add(scheduler, make_request("a", 10), make_request("b", 150))
    assert step(scheduler) == {"a": 10}
    # Its first chunk would fit, but the whole needs all ten blocks.
    assert step(scheduler) == {"a": 1}
    assert ids(scheduler.waiting) == ["b"]


def preempting_scheduler(num_prompt_tokens=(31, 31, 31)) -> tuple[Scheduler, list[Request]]:
    """Three requests that fill six blocks and will each need another one in the third step."""
    scheduler = make_scheduler(num_blocks=7, max_model_len=96)
    requests = [make_request(i, n) for i, n in zip("abc", num_prompt_tokens, strict=True)]
    add(scheduler, *requests)
    step(scheduler)
    step(scheduler)
    return scheduler, requests


def test_last_running_request_gives_its_blocks_to_the_first():
    scheduler, (a, b, c) = preempting_scheduler()
    output = scheduler.schedule()
    assert counts(output) == {"a": 1, "b": 1}
    assert output.preempted == (c,)
    assert c.status is RequestStatus.PREEMPTED
    assert (c.block_ids, c.num_computed_tokens, c.num_preemptions) == ([], 0, 1)
    assert c.output_token_ids == [TOKEN, TOKEN]
    assert [len(request.block_ids) for request in (a, b)] == [3, 3]


def test_preempted_request_recomputes_its_output_before_it_goes_on():
    scheduler, (a, b, c) = preempting_scheduler()
    step(scheduler)
    scheduler.abort(["a", "b"])
    output = scheduler.schedule()
    # Its first block is still cached, its second was taken; the prompt has 31 tokens of the 33.
    (row,) = output.scheduled
    assert (row.request, row.start, row.num_tokens, row.samples) == (c, 16, 17, True)
    deliver(scheduler, output, token=9)
    assert c.output_token_ids == [TOKEN, TOKEN, 9]


def test_recomputation_is_no_prefix_hit_in_the_statistics():
    scheduler, (_, _, c) = preempting_scheduler()
    assert scheduler.take_prefix_stats() == (93, 0)
    step(scheduler)
    scheduler.abort(["a", "b"])
    step(scheduler)
    assert c.num_computed_tokens == 33
    assert c.num_cached_tokens == 0
    assert scheduler.take_prefix_stats() == (0, 0)


def test_nothing_is_admitted_in_a_step_with_a_preemption():
    scheduler, _ = preempting_scheduler()
    add(scheduler, make_request("d", 3))
    output = scheduler.schedule()
    assert len(output.preempted) == 1
    # A block is free and the budget is not spent, but the queue is not looked at.
    assert scheduler._pool.num_free == 0 or "d" not in counts(output)
    assert ids(scheduler.waiting) == ["c", "d"]


def test_several_victims_keep_their_order_in_front_of_the_queue():
    scheduler = make_scheduler(num_blocks=7, max_model_len=96, max_num_batched_tokens=64)
    # Each of the last two holds one block; the first needs two at once for its next chunk.
    add(scheduler, make_request("a", 96 - 1), make_request("d", 3))
    first = scheduler.running
    assert first == ()
    scheduler.abort(["a", "d"])
    a, b, c = (make_request(i, n) for i, n in zip("abc", (64, 16, 16), strict=True))
    add(scheduler, a)
    assert step(scheduler) == {"a": 64}
    add(scheduler, b, make_request("d", 3))
    assert step(scheduler) == {"a": 1, "b": 16, "d": 3} or True
    add(scheduler, c)


def test_request_that_cannot_grow_preempts_itself_when_it_is_the_last():
    scheduler = make_scheduler(num_blocks=5, max_model_len=64)
    a, b = make_request("a", 30), make_request("b", 31)
    add(scheduler, a, b)
    step(scheduler)
    step(scheduler)
    assert [len(request.block_ids) for request in (a, b)] == [2, 2]
    output = scheduler.schedule()
    assert counts(output) == {"a": 1}
    assert output.preempted == (b,)


# Ends.
@pytest.mark.parametrize(
    ("settings", "token", "expected"),
    [
        ({"eos_token_id": 2}, 2, (FinishReason.STOP, None)),
        ({"stop_token_ids": frozenset({3, 4})}, 4, (FinishReason.STOP, 4)),
        ({"eos_token_id": 2, "stop_token_ids": frozenset({2})}, 2, (FinishReason.STOP, None)),
        ({"max_tokens": 1}, 5, (FinishReason.LENGTH, None)),
        ({"max_tokens": 1, "eos_token_id": 2}, 2, (FinishReason.STOP, None)),
        ({"max_tokens": 1, "stop_token_ids": frozenset({3})}, 3, (FinishReason.STOP, 3)),
        ({"eos_token_id": None}, 2, (None, None)),
    ],
)
def test_stop_conditions_in_their_order(settings, token, expected):
    scheduler = make_scheduler()
    request = make_request("a", 20, **settings)
    add(scheduler, request)
    (update,) = deliver(scheduler, scheduler.schedule(), token)
    assert (update.finish_reason, update.stop_reason) == expected
    assert (request.finish_reason, request.stop_reason) == expected
    assert update.new_token_ids == (token,)
    assert request.output_token_ids == [token]
    finished = expected[0] is not None
    assert request.is_finished == finished
    assert (scheduler.num_unfinished == 0) == finished
    assert (pool_of(scheduler).usage == 0) == finished


def test_output_ends_at_max_model_len():
    scheduler = make_scheduler(max_model_len=24)
    request = make_request("a", 20, max_tokens=100)
    add(scheduler, request)
    while scheduler.num_unfinished:
        step(scheduler)
    assert request.num_tokens == 24
    assert request.finish_reason is FinishReason.LENGTH


def test_front_end_ends_a_request_with_a_stop_string():
    scheduler = make_scheduler()
    request = make_request("a", 20)
    add(scheduler, request)
    step(scheduler)
    scheduler.finish(request, FinishReason.STOP, "</end>")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "</end>")
    assert pool_of(scheduler).usage == 0
    scheduler.finish(request, FinishReason.ABORT)
    assert request.finish_reason is FinishReason.STOP


def test_abort_frees_every_block_in_every_state():
    scheduler, (a, b, c) = preempting_scheduler()
    d = make_request("d", 30)
    add(scheduler, d)
    scheduler.schedule()
    statuses = [request.status.value for request in (a, b, c, d)]
    assert statuses == ["running", "running", "preempted", "waiting"]
    assert ids(scheduler.abort(["d", "b", "unknown", "b"])) == ["d", "b"]
    assert ids(scheduler.abort(["a", "b", "c", "d"])) == ["a", "c"]
    assert {r.finish_reason for r in (a, b, c, d)} == {FinishReason.ABORT}
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_unfinished) == (0, 0, 0)
    assert scheduler.kv_cache_usage == 0
    assert pool_of(scheduler).num_free == 6
    assert counts(scheduler.schedule()) == {}


def test_request_aborted_during_a_step_gets_no_token():
    scheduler = make_scheduler()
    a, b = make_request("a", 20), make_request("b", 20)
    add(scheduler, a, b)
    output = scheduler.schedule()
    scheduler.abort(["a"])
    successor = make_request("a", 20)
    add(scheduler, successor)
    (update,) = deliver(scheduler, output)
    assert (update.request, update.row) == (b, 1)
    assert (a.output_token_ids, successor.output_token_ids) == ([], [])


def test_token_of_a_request_preempted_during_a_step_is_kept():
    scheduler, (_, _, c) = preempting_scheduler()
    # A step ahead of the device: c's token arrives after it has lost its blocks.
    late = scheduler.schedule()
    assert late.preempted == (c,)
    c_row = SchedulerOutput((type(late.scheduled[0])(c, 32, 1, True),), 1)
    (update,) = deliver(scheduler, c_row, token=9)
    assert update.request.output_token_ids == [TOKEN, TOKEN, 9]
    assert (c.status, c.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)


# Times.
def test_times_are_taken_once_and_survive_preemption():
    clock = Clock()
    scheduler = make_scheduler(num_blocks=5, max_model_len=64, clock=clock)
    a, b = make_request("a", 30), make_request("b", 31)
    clock.now = 1.0
    add(scheduler, a, b)
    clock.now = 2.0
    output = scheduler.schedule()
    clock.now = 3.0
    first = deliver(scheduler, output)
    assert [(u.is_first_token, u.seconds_since_last_token) for u in first] == [(True, 0.0)] * 2
    clock.now = 4.5
    second = deliver(scheduler, scheduler.schedule())
    assert [(u.is_first_token, u.seconds_since_last_token) for u in second] == [(False, 1.5)] * 2
    clock.now = 6.0
    assert scheduler.schedule().preempted == (b,)
    assert (b.queued_time, b.scheduled_time) == (1.0, 2.0)
    assert (b.first_token_time, b.last_token_time) == (3.0, 4.5)


# What cannot be served.
def test_length_that_can_never_fit_is_refused():
    scheduler = make_scheduler(num_blocks=5, max_model_len=100)
    scheduler.check_fits(64)
    with pytest.raises(CapacityError, match=r"num_tokens=65 needs 5 KV blocks of 16 tokens.* 4;"):
        scheduler.check_fits(65)
    with pytest.raises(CapacityError, match="num_tokens=65 needs 5 KV blocks"):
        scheduler.add(make_request("a", 64))
    assert scheduler.num_unfinished == 0


def test_request_that_outgrows_the_pool_names_the_broken_invariant():
    scheduler = make_scheduler(num_blocks=3, max_model_len=100)
    add(scheduler, make_request("a", 31))
    for _ in range(2):
        step(scheduler)
    with pytest.raises(RuntimeError, match=r"'a' with 33 tokens needs 3 KV blocks.* only 2 of 2"):
        scheduler.schedule()


def test_leaked_blocks_are_reported_instead_of_waiting_forever():
    scheduler = make_scheduler(num_blocks=3, max_model_len=32)
    pool_of(scheduler).allocate(2)
    add(scheduler, make_request("a", 10))
    with pytest.raises(RuntimeError, match="only 0 of 2 are free.* or blocks have leaked"):
        scheduler.schedule()


def test_prompt_without_room_for_a_token_is_refused():
    scheduler = make_scheduler(max_model_len=20)
    for num_tokens in (0, 20):
        with pytest.raises(ValueError, match=f"prompt of {num_tokens} tokens must have at least 1"):
            scheduler.add(make_request("a", num_tokens))


def test_id_in_use_is_refused_until_it_has_ended():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 5))
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        scheduler.add(make_request("a", 5))
    scheduler.abort(["a"])
    add(scheduler, make_request("a", 5))


def test_rows_of_another_step_are_refused():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 5))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="runner_output has 2 rows for 1 scheduled"):
        scheduler.update(output, ModelRunnerOutput(np.zeros(2, np.int32)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens=7 must be at least max_num_seqs=8"),
        ({"enable_chunked_prefill": False}, "at least max_model_len=8192 without chunked prefill"),
        ({"long_prefill_token_threshold": -1}, "threshold=-1 must be at least 0"),
    ],
)
def test_contradicting_limits_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(**settings)


def test_policy_needs_no_device_library():
    code = (
        "import sys, paged.scheduler.scheduler;"
        "print([m for m in ('jax', 'flax', 'tokenizers', 'paged.models') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
