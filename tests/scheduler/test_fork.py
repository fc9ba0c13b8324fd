"""Forks and samples: what is shared, and who gets a copy when somebody writes."""

import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from tests.scheduler.stepping import (
    BLOCK_SIZE,
    add,
    counts,
    deliver,
    make_request,
    make_scheduler,
    step,
)


def make_samples(num_tokens: int, n: int) -> list[Request]:
    prompt = make_request("p", num_tokens)
    return [
        Request(
            f"{i}_p",
            prompt.prompt_token_ids,
            prompt.params,
            50,
            parent_id="p",
            index=i,
            num_samples=n,
        )
        for i in range(n)
    ]


def child_of(parent: Request, request_id: str = "child", **settings) -> Request:
    tokens = tuple(parent.tokens(0, parent.num_tokens))
    return Request(request_id, tokens, parent.params, 50, **settings)


@pytest.mark.parametrize("enable_caching", [True, False])
def test_four_samples_of_a_prompt_hold_its_full_blocks_once(enable_caching):
    pool = BlockPool(201, BLOCK_SIZE, enable_caching)
    scheduler = Scheduler(
        pool=pool, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2048
    )
    samples = make_samples(1000, 4)
    add(scheduler, *samples)
    step(scheduler)
    step(scheduler)
    assert scheduler.num_running == 4
    # 62 full blocks once, and a last one of each sample's own.
    assert pool.num_usable - pool.num_free == 62 + 4
    tables = [sample.block_ids for sample in samples]
    assert all(table[:62] == tables[0][:62] for table in tables)
    assert len({table[62] for table in tables}) == 4
    assert [pool.ref_count(block_id) for block_id in tables[0]] == [4] * 62 + [1]
    scheduler.abort([sample.request_id for sample in samples])
    assert pool.num_free == pool.num_usable


def test_without_a_cache_a_prompt_is_computed_once_and_copied_where_samples_part():
    scheduler = Scheduler(
        pool=BlockPool(101, BLOCK_SIZE, enable_caching=False),
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=1024,
    )
    add(scheduler, *make_samples(100, 3))
    assert step(scheduler) == {"0_p": 100}
    output = scheduler.schedule()
    assert counts(output) == {"0_p": 1, "1_p": 1, "2_p": 1}
    first = scheduler.running[0].block_ids
    assert [source for source, _ in output.block_copies] == [first[6], first[6]]
    destinations = [scheduler.running[i].block_ids[6] for i in (1, 2)]
    assert [destination for _, destination in output.block_copies] == destinations
    # The last prompt token is computed again, for its logits.
    assert [row.start for row in output.scheduled] == [100, 99, 99]


def test_who_writes_first_into_a_shared_block_gets_the_copy():
    scheduler = make_scheduler(num_blocks=101)
    parent = make_request("parent", 20)
    add(scheduler, parent)
    step(scheduler)
    shared = list(parent.block_ids)
    child = child_of(parent)
    scheduler.fork(parent, child)
    assert child.block_ids == shared
    output = scheduler.schedule()
    ((source, destination),) = output.block_copies
    assert source == shared[1]
    # The parent came first; the child is the last owner and goes on in place.
    assert parent.block_ids == [shared[0], destination]
    assert child.block_ids == shared
    assert counts(output) == {"parent": 1, "child": 1}
    assert [scheduler.pool.ref_count(i) for i in (*shared, destination)] == [2, 1, 1]


def test_fork_on_a_block_boundary_copies_nothing():
    scheduler = make_scheduler()
    parent = make_request("parent", 32)
    add(scheduler, parent)
    step(scheduler)
    scheduler.fork(parent, child_of(parent))
    assert scheduler.schedule().block_copies == ()


def test_table_version_changes_with_a_replaced_block():
    scheduler = make_scheduler()
    parent = make_request("parent", 20)
    add(scheduler, parent)
    step(scheduler)
    child = child_of(parent)
    before = parent.table_version
    scheduler.fork(parent, child)
    assert child.table_version != parent.table_version == before
    step(scheduler)
    assert parent.table_version not in (before, child.table_version)


def test_copy_needs_a_free_block_and_preempts_like_any_other():
    scheduler = make_scheduler(num_blocks=3, max_model_len=32)
    parent = make_request("parent", 20)
    add(scheduler, parent)
    step(scheduler)
    scheduler.fork(parent, child_of(parent))
    # The child has done nothing yet: it gives the shared blocks up and waits.
    output = scheduler.schedule()
    assert counts(output) == {"parent": 1}
    assert output.block_copies == ()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    deliver(scheduler, output)


def test_child_of_other_tokens_or_another_tenant_is_refused():
    scheduler = make_scheduler()
    parent = make_request("parent", 20)
    add(scheduler, parent)
    with pytest.raises(ValueError, match="'parent' is not running"):
        scheduler.fork(parent, child_of(parent))
    step(scheduler)
    with pytest.raises(ValueError, match="does not start with the 20 tokens"):
        scheduler.fork(parent, make_request("other", 30))
    with pytest.raises(ValueError, match="under the same salt and adapter"):
        scheduler.fork(parent, child_of(parent, cache_salt="tenant"))
    with pytest.raises(ValueError, match="'parent' is in use"):
        scheduler.fork(parent, child_of(parent, "parent"))
