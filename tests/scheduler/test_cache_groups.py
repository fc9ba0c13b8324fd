"""Models that mix full and sliding-window layers: several block tables, one pool."""

import math

import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from tests.scheduler.stepping import add, step

BLOCK_SIZE = 4


def make_scheduler(windows, num_blocks=200, **settings) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256}
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Scheduler(pool=pool, windows=windows, **limits | settings)


def make_request(request_id, num_tokens, max_tokens=100, first=0) -> Request:
    prompt = tuple(range(first, first + num_tokens))
    return Request(request_id, prompt, SamplingParams(), max_tokens)


def test_blocks_behind_the_window_are_released_and_replaced_by_the_null_block():
    scheduler = make_scheduler((None, 4))
    request = make_request("a", 7)
    add(scheduler, request)
    step(scheduler)
    # The reference's example: window 4 and 7 tokens computed, so 4 are never seen again.
    step(scheduler)
    full, sliding = request.block_tables
    assert len(full) == len(sliding) == 2
    assert sliding[0] == 0
    assert 0 not in full


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 30])
def test_what_a_token_can_see_is_never_released(window):
    scheduler = make_scheduler((None, window))
    request = make_request("a", 50)
    add(scheduler, request)
    while len(request.output_token_ids) < 40:
        start = request.num_computed_tokens
        step(scheduler)
        table = request.block_tables[1]
        first_seen = max(0, start - window + 1) // BLOCK_SIZE
        assert table[first_seen:].count(0) == 0
        assert not any(table[:first_seen])


def test_peak_of_a_sliding_group_is_what_admission_counts_with():
    pool = BlockPool(1000, 16)
    kv = KVManager(pool, windows=(None, 4096), max_num_batched_tokens=4096)
    # The reference's example: ceil((4095 + 4096) / 16) + 1.
    assert kv.num_blocks_for(100_000) == math.ceil(100_000 / 16) + 513
    assert kv.num_blocks_for(160) == 20


def test_pool_smaller_than_the_sum_of_full_tables_serves_a_long_request():
    # 256 tokens take 64 blocks in the full group and at most 7 in the sliding one.
    scheduler = make_scheduler((None, 8), num_blocks=1 + 64 + 7)
    scheduler.check_fits(256)
    request = make_request("a", 200, max_tokens=56)
    add(scheduler, request)
    while scheduler.num_unfinished:
        step(scheduler)
    assert len(request.output_token_ids) == 56
    assert request.num_preemptions == 0


def test_hit_needs_the_window_before_its_end_in_every_sliding_group():
    scheduler = make_scheduler((None, 8))
    first = make_request("a", 42, max_tokens=1)
    add(scheduler, first)
    while scheduler.num_unfinished:
        step(scheduler)
    again = make_request("b", 42)
    add(scheduler, again)
    step(scheduler)
    assert again.num_cached_tokens == 40
    # A window of 8 looks back 7 tokens: two blocks, and nothing before them.
    assert again.block_tables[1][:8] == [0] * 8
    assert 0 not in again.block_tables[1][8:]


def test_hit_ends_where_a_sliding_group_has_lost_its_window():
    scheduler = make_scheduler((None, 8))
    first = make_request("a", 42, max_tokens=1)
    add(scheduler, first)
    while scheduler.num_unfinished:
        step(scheduler)
    hashes = first.block_hashes
    lost = scheduler.pool.lookup(hashes[8] + (1).to_bytes(4, "big"))
    scheduler.pool.evict([lost])
    again = make_request("b", 42, max_tokens=1)
    add(scheduler, again)
    step(scheduler)
    # Blocks 6 and 7 are the last that stand together before the gap at 8.
    assert again.num_cached_tokens == 32


def test_short_prefix_counts_although_it_is_shorter_than_the_window():
    scheduler = make_scheduler((None, 100))
    for request_id, expected in (("a", 0), ("b", 12)):
        request = make_request(request_id, 14, max_tokens=1)
        add(scheduler, request)
        step(scheduler)
        assert request.num_cached_tokens == expected


def test_first_group_must_keep_everything():
    with pytest.raises(ValueError, match="must start with None"):
        KVManager(BlockPool(10, 4), windows=(8,))


def test_events_name_hash_and_group():
    scheduler = make_scheduler((None, 4), num_blocks=100)
    events = []
    scheduler.pool.events.subscribe(events.append)
    add(scheduler, make_request("a", 9, max_tokens=1))
    step(scheduler)
    assert [(event.group, len(event.block_hashes)) for event in events] == [(0, 2), (1, 2)]
    assert events[0].block_hashes == events[1].block_hashes
