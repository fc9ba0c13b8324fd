"""The priority policy: who enters first, who loses blocks, what is rolled back."""

import pytest

from paged.scheduler.request import RequestStatus
from tests.scheduler.stepping import add, counts, deliver, ids, make_request, make_scheduler, step


def urgent(request_id, num_tokens, priority, **settings):
    return make_request(request_id, num_tokens, priority=priority, **settings)


def test_the_most_urgent_enters_first_and_the_earlier_among_equals():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    add(
        scheduler,
        urgent("late", 20, 0, arrival_time=3.0),
        urgent("low", 20, 5, arrival_time=1.0),
        urgent("early", 20, 0, arrival_time=2.0),
    )
    assert ids(scheduler.waiting) == ["early", "late", "low"]
    assert step(scheduler) == {"early": 20}
    scheduler.abort(["early"])
    assert step(scheduler) == {"late": 20}


def test_first_come_first_served_ignores_priorities():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, urgent("first", 20, 9), urgent("second", 20, 0))
    assert step(scheduler) == {"first": 20}


def test_waiting_request_takes_nothing_from_a_less_urgent_running_one():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    add(scheduler, urgent("low", 20, 5))
    step(scheduler)
    add(scheduler, urgent("high", 20, 0))
    assert step(scheduler) == {"low": 1}


def test_the_least_urgent_loses_its_blocks_wherever_it_stands():
    # Four blocks: each prompt takes one and its first token needs another.
    scheduler = make_scheduler(policy="priority", num_blocks=5, max_model_len=64)
    requests = [urgent("low", 16, 5), urgent("high", 16, 0), urgent("mid", 16, 3)]
    add(scheduler, *requests)
    assert step(scheduler) == {"high": 16, "mid": 16, "low": 16}
    output = scheduler.schedule()
    # "high" takes the fourth block; "mid" gets the one of "low", which comes last anyway.
    assert counts(output) == {"high": 1, "mid": 1}
    assert ids(output.preempted) == ["low"]


def test_victim_that_is_in_the_step_already_is_taken_out_of_it():
    scheduler = make_scheduler(policy="priority", num_blocks=6, max_model_len=80)
    low, high = urgent("low", 31, 5, arrival_time=0.0), urgent("high", 32, 0, arrival_time=1.0)
    add(scheduler, low)
    step(scheduler)  # two blocks, the last slot still free
    add(scheduler, high)
    # "low" fills its second block, "high" takes two more.
    assert step(scheduler) == {"low": 1, "high": 32}
    # Both need a third block and there is one: "low" is asked first and takes it.
    output = scheduler.schedule()
    assert counts(output) == {"high": 1}
    assert ids(output.preempted) == ["low"]
    assert low.status is RequestStatus.PREEMPTED
    assert (low.num_computed_tokens, low.num_in_flight) == (0, 0)
    assert len(low.output_token_ids) == 2
    deliver(scheduler, output)


def test_what_a_rolled_back_step_would_have_computed_is_not_cached():
    scheduler = make_scheduler(policy="priority", num_blocks=6, max_model_len=80)
    low, high = urgent("low", 20, 5, arrival_time=0.0), urgent("high", 30, 0, arrival_time=1.0)
    add(scheduler, low)
    step(scheduler)
    add(scheduler, high)
    while high.num_computed_tokens < 32:
        step(scheduler)
    # "low" comes first, takes the last block and computes what fills its second and third, which
    # publishes them; then "high" needs one.
    low.output_token_ids.extend(range(48 - low.num_tokens))  # as after accepted drafts
    scheduler._kv.extend_hashes(low)
    output = scheduler.schedule()
    assert counts(output) == {"high": 1}
    assert ids(output.preempted) == ["low"]
    assert [scheduler.pool.lookup(h) is not None for h in low.block_hashes] == [True, False, False]


def test_budget_of_a_victim_goes_to_the_others():
    scheduler = make_scheduler(
        policy="priority", num_blocks=8, max_model_len=112, max_num_batched_tokens=17
    )
    low, high = urgent("low", 80, 5, arrival_time=0.0), urgent("high", 30, 0, arrival_time=1.0)
    add(scheduler, low)
    step(scheduler)
    add(scheduler, high)
    seen = [step(scheduler) for _ in range(12)]
    assert all(sum(counted.values()) <= 17 for counted in seen)
    assert high.num_preemptions == 0
    assert len(high.output_token_ids) > 0


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'lifo' is unknown; choose one of fcfs, priority"):
        make_scheduler(policy="lifo")
