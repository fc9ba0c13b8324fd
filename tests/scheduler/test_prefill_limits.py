"""Limits on prompts that are computed in parts, and what they leave for everybody else."""

import pytest

from paged.scheduler.prefill_limits import PrefillLimits
from tests.scheduler.stepping import add, ids, make_request, make_scheduler, step


def test_threshold_leaves_room_for_others_and_none_if_there_are_none():
    scheduler = make_scheduler(max_num_batched_tokens=100, long_prefill_token_threshold=40)
    add(scheduler, make_request("a", 130))
    assert step(scheduler) == {"a": 100}
    add(scheduler, make_request("b", 90))
    assert step(scheduler) == {"a": 30, "b": 40}


def test_one_partial_prefill_at_a_time():
    scheduler = make_scheduler(
        max_num_batched_tokens=100, long_prefill_token_threshold=40, max_num_partial_prefills=1
    )
    add(scheduler, make_request("a", 90), make_request("b", 90), make_request("c", 20))
    # "b" would be a second one; "c" is computed in one go and overtakes it.
    assert step(scheduler) == {"a": 40, "c": 20}
    assert ids(scheduler.waiting) == ["b"]
    assert step(scheduler) == {"c": 1, "a": 40}
    # The last part of "a" makes room for the next.
    assert step(scheduler) == {"c": 1, "a": 10, "b": 40}


def test_short_prompts_overtake_long_ones_that_wait_for_each_other():
    scheduler = make_scheduler(
        max_num_batched_tokens=100,
        long_prefill_token_threshold=30,
        max_num_partial_prefills=3,
        max_long_partial_prefills=1,
    )
    add(scheduler, make_request("long", 90), make_request("longer", 120), make_request("short", 25))
    assert step(scheduler) == {"long": 30, "short": 25}
    assert ids(scheduler.waiting) == ["longer"]
    for _ in range(2):
        step(scheduler)
    assert step(scheduler)["longer"] == 30


def test_who_is_passed_over_keeps_its_place():
    scheduler = make_scheduler(
        max_num_batched_tokens=50, long_prefill_token_threshold=20, max_num_partial_prefills=1
    )
    add(scheduler, *[make_request(name, 60) for name in "abcd"])
    step(scheduler)
    assert ids(scheduler.waiting) == ["b", "c", "d"]


@pytest.mark.parametrize("limits", [{}, {"max_num_partial_prefills": 1}])
def test_decodes_go_on_under_a_stream_of_long_prompts(limits):
    scheduler = make_scheduler(max_num_batched_tokens=64, **limits)
    chat = make_request("chat", 10, max_tokens=200)
    add(scheduler, chat)
    step(scheduler)
    for i in range(100):
        if i % 4 == 0:
            add(scheduler, make_request(f"document {i}", 500, max_tokens=2))
        assert step(scheduler)["chat"] == 1
    assert scheduler.num_waiting  # there is more of it than can be served


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"long_prefill_token_threshold": -1}, "threshold=-1 must be at least 0"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills=0 must be at least 1"),
        ({"max_long_partial_prefills": 0}, "max_long_partial_prefills=0 must be at least 1"),
        (
            {"max_num_partial_prefills": 1, "max_long_partial_prefills": 2},
            "max_long_partial_prefills=2 must not exceed max_num_partial_prefills=1",
        ),
    ],
)
def test_limits_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PrefillLimits(**settings)
