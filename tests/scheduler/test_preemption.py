"""What happens when blocks run out: who loses them, what is kept, who enters next."""

from paged.scheduler.output import FinishReason
from paged.scheduler.params import SamplingParams
from paged.scheduler.prefix_stats import PrefixStats
from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.scheduler import Scheduler
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


def test_last_running_request_gives_its_blocks_to_the_first():
    scheduler, (a, b, c) = preempting_scheduler()
    output = scheduler.schedule()
    assert counts(output) == {"a": 1, "b": 1}
    assert output.preempted == (c,)
    assert c.status is RequestStatus.PREEMPTED
    assert (c.block_ids, c.num_published_blocks, c.num_computed_tokens) == ([], 0, 0)
    assert c.num_preemptions == 1
    assert c.output_token_ids == [TOKEN, TOKEN]
    # The tail of its blocks went first; the head is still cached.
    assert (a.block_ids, b.block_ids) == ([1, 2, 6], [3, 4])
    assert scheduler.pool.lookup(c.block_hashes[0]) == 5


def test_preempted_request_recomputes_its_output_before_it_goes_on():
    scheduler, (_, _, c) = preempting_scheduler()
    step(scheduler)
    scheduler.abort(["a", "b"])
    output = scheduler.schedule()
    # One block of its 31 prompt and 2 output tokens is still cached.
    (row,) = output.scheduled
    assert (row.request, row.start, row.num_tokens, row.samples) == (c, 16, 17, True)
    deliver(scheduler, output, token=9)
    assert c.output_token_ids == [TOKEN, TOKEN, 9]


def test_recomputation_is_no_prefix_hit_in_the_statistics():
    scheduler, (_, _, c) = preempting_scheduler()
    assert scheduler.take_prefix_stats() == PrefixStats(82, 0)
    step(scheduler)
    scheduler.abort(["a", "b"])
    assert step(scheduler) == {"c": 17}
    assert c.num_cached_tokens == 0
    assert scheduler.take_prefix_stats() == PrefixStats(0, 0)


def test_waiting_request_is_counted_when_it_enters_not_when_it_is_tried():
    scheduler, _ = preempting_scheduler()
    scheduler.take_prefix_stats()
    add(scheduler, make_request("d", 40))
    for _ in range(3):
        step(scheduler)
        assert scheduler.take_prefix_stats() == PrefixStats(0, 0)
    scheduler.abort(["a", "b", "c"])
    step(scheduler)
    assert scheduler.take_prefix_stats() == PrefixStats(40, 0)


def test_nothing_is_admitted_in_a_step_with_a_preemption():
    scheduler = make_scheduler(num_blocks=5, max_model_len=64)
    a, b = (Request(i, tuple(range(32)), SamplingParams(), 9) for i in "ab")
    add(scheduler, a, b)
    assert step(scheduler) == {"a": 32, "b": 16}
    # b computed its second block itself; preempted, it could share a's and enter again at once.
    output = scheduler.schedule()
    assert (counts(output), output.preempted) == ({"a": 1}, (b,))
    deliver(scheduler, output)
    assert step(scheduler) == {"a": 1, "b": 1}
    assert b.block_ids[:2] == a.block_ids[:2]


def scheduler_with_two_victims() -> tuple[Scheduler, list[Request]]:
    """One free block, and a first request whose next chunk needs three."""
    scheduler = make_scheduler(
        num_blocks=7,
        max_model_len=96,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=48,
    )
    requests = [make_request(i, n) for i, n in zip("abc", (95, 8, 8), strict=True)]
    add(scheduler, *requests)
    return scheduler, requests


def test_several_victims_keep_their_order_in_front_of_the_queue():
    scheduler, (_, b, c) = scheduler_with_two_victims()
    assert step(scheduler) == {"a": 48, "b": 8, "c": 8}
    add(scheduler, make_request("d", 3))
    output = scheduler.schedule()
    assert counts(output) == {"a": 47}
    assert output.preempted == (b, c)
    assert ids(scheduler.waiting) == ["b", "c", "d"]
    (update,) = deliver(scheduler, output)
    assert update.finish_reason is FinishReason.LENGTH
    assert list(step(scheduler)) == ["b", "c", "d"]


def test_token_that_arrives_after_the_preemption_is_kept():
    scheduler, (_, b, c) = scheduler_with_two_victims()
    # A step ahead of the device: b and c lose their blocks before their tokens arrive.
    late = scheduler.schedule()
    assert scheduler.schedule().preempted == (b, c)
    assert ids(update.request for update in deliver(scheduler, late, token=9)) == ["b", "c"]
    for request in (b, c):
        assert request.output_token_ids == [9]
        assert (request.status, request.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)


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
