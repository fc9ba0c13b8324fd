"""`Auto`: what it follows on which trace, and that it does not lose to LRU."""

import itertools

import pytest

from benchmarks.eviction_table import (
    NUM_BLOCKS,
    TRACES,
    TraceRequest,
    document,
    hit_blocks,
    passes,
    play,
)
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.eviction.auto import Auto

BLOCK_SIZE = 16


def play_all(policy: Auto, *traces) -> list[int]:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, policy=policy)
    return list(play(pool, itertools.chain(*traces), queue=1))


def test_reference_experiment_reaches_the_optimum_without_knowing_the_queue():
    hits = play_all(Auto(), passes("ffr"))
    tokens = [BLOCK_SIZE * sum(batch) for batch in itertools.batched(hits, 10)]
    assert tokens == [0, 21_488, 21_488]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("trace", TRACES)
def test_no_trace_loses_two_percent_of_the_hits_of_lru(trace, seed):
    lru = hit_blocks("lru", TRACES[trace](seed))
    assert hit_blocks("auto", TRACES[trace](seed)) >= 0.98 * lru


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_no_trace_loses_two_percent_of_the_hits_of_lru_over_100_seeds(trace):
    for seed in range(100):
        lru = hit_blocks("lru", TRACES[trace](seed))
        assert hit_blocks("auto", TRACES[trace](seed)) >= 0.98 * lru, f"seed {seed}"


def test_loop_over_more_than_the_pool_is_not_left_to_lru():
    policy = Auto()
    assert policy.num_hits == 0
    play_all(policy, passes("ff"))
    assert policy.num_hits == 2


def test_reuse_before_the_pool_is_full_is_answered_by_lru():
    policy = Auto()
    play_all(policy, [document(1), document(1)], passes("f"))
    assert policy.num_hits == 0


@pytest.mark.parametrize("trace", ["chat", "agent tree", "working set"])
def test_growing_histories_are_served_exactly_as_by_lru(trace):
    policy = Auto()
    hits = play_all(policy, TRACES[trace](0))
    assert policy.num_hits == 0
    assert sum(hits) == hit_blocks("lru", TRACES[trace](0))


def test_scan_moves_it_to_lip():
    policy = Auto()
    hits = play_all(policy, TRACES["hot + scan"](0))
    assert policy.num_hits == 1
    assert sum(hits) > 1.1 * hit_blocks("lru", TRACES["hot + scan"](0))


def test_chat_after_a_loop_moves_it_to_lru_within_a_few_capacities_of_hits():
    policy = Auto()
    hits = play_all(policy, passes("fff"), TRACES["chat"](0))
    assert policy.num_hits == 0
    lru = hit_blocks("lru", itertools.chain(passes("fff"), TRACES["chat"](0)))
    assert lru - 3 * NUM_BLOCKS < sum(hits[30:]) < lru


def test_without_reports_of_lookups_it_is_lru():
    policy = Auto()
    policy.lookup = lambda keys, num_hits: None
    hits = play_all(policy, passes("ffr"))
    assert sum(hits) * BLOCK_SIZE == 21_488
    assert sum(hits[:20]) == 0


def test_reset_forgets_contents_and_keeps_what_was_learnt():
    policy = Auto()
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, policy=policy)
    list(play(pool, passes("ff")))
    assert pool.reset_prefix_cache()
    assert policy.num_hits == 2
    hits = list(play(pool, passes("ff")))
    assert (sum(hits[:10]), sum(hits[10:])) == (0, 1343)


def test_shadows_forget_keys_that_lru_would_have_forgotten():
    policy = Auto()
    pool = BlockPool(101, BLOCK_SIZE, policy=policy)
    trace = (TraceRequest(document(i // 2, 20).keys) for i in range(400))
    list(play(pool, trace))
    assert len(policy._reuses._counts) <= 2 * 25
    assert all(len(shadow._order) <= 25 for shadow in policy._shadows)
    assert all(len(shadow._order._hits) <= 25 for shadow in policy._shadows)
