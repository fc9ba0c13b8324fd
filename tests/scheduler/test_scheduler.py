"""`Scheduler`: budgets, order, preemption, stops, and the way back of every block."""

import numpy as np
import pytest

from paged.scheduler.errors import CapacityError
from paged.scheduler.output import FinishReason, ModelRunnerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from tests.scheduler.stepping import (
    TOKEN,
    add,
    counts,
    deliver,
    ids,
    make_request,
    make_scheduler,
    preempting_scheduler,
    step,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


def test_step_is_planned_while_a_sample_is_in_flight():
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, make_request("a", 5, max_tokens=2), make_request("b", 30))
    first = scheduler.schedule()
    assert counts(first) == {"a": 5, "b": 15}
    second = scheduler.schedule()
    assert counts(second) == {"a": 1, "b": 15}
    assert [row.input_in_flight for row in second.scheduled] == [True, False]
    assert ids(update.request for update in deliver(scheduler, first)) == ["a"]
    third = scheduler.schedule()
    # What is in flight of "a" is its last token.
    assert counts(third) == {"b": 1}
    assert ids(update.request for update in deliver(scheduler, second)) == ["a", "b"]
    assert ids(update.request for update in deliver(scheduler, third)) == ["b"]
    assert scheduler.num_running == 1


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
    assert (scheduler.pool.usage == 0) == finished


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
    assert scheduler.pool.usage == 0
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
    assert scheduler.pool.num_free == 6
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
    scheduler.pool.allocate(2)
    add(scheduler, make_request("a", 10))
    with pytest.raises(RuntimeError, match=r"only 0 of 2 are free.* or blocks have leaked"):
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
