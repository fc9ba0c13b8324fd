"""`BlockPool`: ids, reference counts, order of reuse, contents."""

import logging

import pytest

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.cache_events import AllBlocksCleared, BlockRemoved
from paged.scheduler.eviction.recency import MRU
from paged.scheduler.prefix_cache import HashIndex

BLOCK_SIZE = 16
HASHES = [bytes([i]) * 32 for i in range(16)]


def make_pool(num_blocks: int = 11) -> BlockPool:
    return BlockPool(num_blocks, BLOCK_SIZE)


def allocate_cached(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.register(block_id, block_hash)
    return block_ids


def allocate_chain(pool: BlockPool, hashes: list[bytes], parent: int = NULL_BLOCK) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.register(block_id, block_hash, parent)
        parent = block_id
    return block_ids


def test_blocks_are_handed_out_in_id_order_without_the_null_block():
    pool = make_pool()
    assert (pool.num_usable, pool.num_free) == (10, 10)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(6) == [5, 6, 7, 8, 9, 10]
    assert (pool.num_free, pool.free_order()) == (0, [])


def test_freed_blocks_without_content_go_to_the_front_in_the_given_order():
    pool = make_pool()
    pool.allocate(5)
    pool.free([3, 2, 4])
    assert pool.free_order() == [3, 2, 4, 6, 7, 8, 9, 10]


def test_freed_cached_blocks_go_to_the_end_in_the_given_order():
    pool = make_pool()
    allocate_cached(pool, HASHES[:2])
    pool.allocate(1)
    pool.free([3, 2, 1])
    assert pool.free_order() == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]


def test_block_is_not_reused_while_referenced():
    pool = make_pool(3)
    block_ids = allocate_cached(pool, HASHES[:1])
    pool.touch(block_ids)
    pool.free(block_ids)
    assert pool.ref_count(1) == 1
    assert pool.free_order() == [2]
    pool.free(block_ids)
    assert pool.free_order() == [2, 1]


def test_touching_a_free_block_takes_it_out_of_the_middle_of_the_queue():
    pool = make_pool(6)
    allocate_cached(pool, HASHES[:5])
    pool.free([5, 4, 3, 2, 1])
    pool.touch([3])
    assert pool.free_order() == [5, 4, 2, 1]
    assert pool.num_unreferenced([1, 2, 3]) == 2
    assert pool.allocate(4) == [5, 4, 2, 1]


def test_reuse_evicts_the_content_and_a_free_block_keeps_it_until_then():
    pool = make_pool(3)
    allocate_cached(pool, HASHES[:2])
    pool.free([2, 1])
    assert (pool.lookup(HASHES[0]), pool.lookup(HASHES[1])) == (1, 2)
    assert pool.allocate(1) == [2]
    assert (pool.lookup(HASHES[0]), pool.lookup(HASHES[1])) == (1, None)
    assert pool.block_hash(2) is None


def test_duplicates_are_kept_and_the_first_inserted_answers():
    pool = make_pool(4)
    allocate_cached(pool, [HASHES[0], HASHES[0], HASHES[0]])
    assert pool.lookup(HASHES[0]) == 1
    pool.free([1])
    assert pool.allocate(1) == [1]
    assert pool.lookup(HASHES[0]) == 2
    pool.free([3, 2])
    assert pool.allocate(2) == [3, 2]
    assert pool.lookup(HASHES[0]) is None


def test_without_caching_nothing_is_findable_and_everything_goes_to_the_front():
    pool = BlockPool(6, BLOCK_SIZE, enable_caching=False)
    allocate_cached(pool, HASHES[:3])
    assert pool.lookup(HASHES[0]) is None
    pool.free([3, 2, 1])
    assert pool.free_order() == [3, 2, 1, 4, 5]


def test_usage_counts_referenced_blocks_among_usable_ones():
    pool = make_pool(101)
    pool.allocate(8)
    assert pool.usage == pytest.approx(0.08)
    assert make_pool(1).usage == 0.0


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (100, 7)])
def test_number_of_blocks_rounds_up(num_tokens, blocks):
    assert make_pool().num_blocks_for(num_tokens) == blocks


def test_reset_clears_contents_and_keeps_the_order(caplog):
    pool = make_pool(5)
    allocate_cached(pool, HASHES[:3])
    pool.free([2, 3, 1])
    with caplog.at_level(logging.INFO):
        assert pool.reset_prefix_cache()
    assert "Successfully reset prefix cache" in caplog.text
    assert all(pool.lookup(block_hash) is None for block_hash in HASHES)
    assert pool.free_order() == [4, 2, 3, 1]
    assert pool.allocate(4) == [4, 2, 3, 1]


def test_reset_is_refused_while_blocks_are_referenced(caplog):
    pool = make_pool(5)
    allocate_cached(pool, HASHES[:3])
    pool.free([2])
    assert not pool.reset_prefix_cache()
    assert (
        "Failed to reset prefix cache because some blocks (2) are not freed yet" in caplog.messages
    )
    assert pool.lookup(HASHES[0]) == 1


def test_more_blocks_than_are_free_are_refused_without_effect():
    pool = make_pool(4)
    with pytest.raises(ValueError, match="count=4 exceeds the 3 free blocks"):
        pool.allocate(4)
    assert pool.free_order() == [1, 2, 3]


def test_double_free_is_an_error():
    pool = make_pool(4)
    pool.allocate(2)
    pool.free([1])
    with pytest.raises(RuntimeError, match="block 1 is already free"):
        pool.free([1])
    with pytest.raises(RuntimeError, match="block 2 is already free"):
        pool.free([2, 2])


@pytest.mark.parametrize("block_id", [0, 4, -1])
def test_ids_that_no_request_can_hold_are_errors(block_id):
    pool = make_pool(4)
    for operation in (pool.free, pool.touch):
        with pytest.raises(RuntimeError, match=f"block {block_id} cannot be held: ids are 1 to 3"):
            operation([block_id])
    with pytest.raises(RuntimeError, match="0 is the null block"):
        pool.register(block_id, HASHES[0])


def test_touching_a_free_block_without_content_is_an_error():
    with pytest.raises(RuntimeError, match="block 1 is free and not cached"):
        make_pool().touch([1])


def test_registering_a_free_or_cached_block_is_an_error():
    pool = make_pool()
    with pytest.raises(RuntimeError, match="block 1 is free or has a hash"):
        pool.register(1, HASHES[0])
    allocate_cached(pool, HASHES[:1])
    with pytest.raises(RuntimeError, match="block 1 is free or has a hash"):
        pool.register(1, HASHES[1])


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="num_blocks=0 must be at least 1"):
        BlockPool(0, BLOCK_SIZE)
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        BlockPool(4, 0)


def test_chain_is_known_by_depth_parent_and_children():
    pool = make_pool()
    allocate_chain(pool, HASHES[:3])
    allocate_chain(pool, HASHES[3:4], parent=1)
    assert [pool.depth(block_id) for block_id in (1, 2, 3, 4)] == [0, 1, 2, 1]
    assert [pool.parent(block_id) for block_id in (1, 2, 3, 4)] == [None, 1, 2, 1]
    assert [pool.children(block_id) for block_id in (1, 2, 3, 5)] == [[2, 4], [3], [], []]
    assert [pool.is_leaf(block_id) for block_id in (1, 2, 3, 4)] == [False, False, True, True]


def test_block_with_a_duplicate_is_a_leaf_because_the_content_stays():
    pool = make_pool()
    allocate_chain(pool, HASHES[:2])
    allocate_chain(pool, HASHES[:1])
    assert pool.is_leaf(1)
    assert pool.is_leaf(3)
    pool.free([3])
    pool.allocate(pool.num_free)
    assert not pool.is_leaf(1)


def test_victim_that_others_follow_on_outlives_them():
    pool = BlockPool(7, BLOCK_SIZE, policy=MRU())
    shared, *_ = allocate_chain(pool, HASHES[:3])
    pool.free([3, 2, 1])
    pool.touch([shared])
    allocate_chain(pool, HASHES[3:5], parent=shared)
    pool.free([5, 4, 1])
    # Most recent first: 5 and 4, then the shared block - but 3 and 2 follow on it.
    assert pool.free_order()[1:] == [5, 4, 1, 3, 2]
    assert pool.allocate(6) == [6, 5, 4, 3, 2, 1]


def test_chain_whose_head_is_named_is_evicted_deepest_first_in_linear_time(monkeypatch):
    length = 20_000
    pool = BlockPool(length + 2, BLOCK_SIZE, policy=MRU())
    keys = [str(index).encode() for index in range(length)]
    table = allocate_chain(pool, keys)
    # Head first, and so MRU names the head last.
    pool.free(table)
    pool.allocate(1)
    steps = []
    get = HashIndex.get
    monkeypatch.setattr(HashIndex, "get", lambda index, key: steps.append(key) or get(index, key))
    assert [pool.allocate(1)[0] for _ in range(length)] == table[::-1]
    assert length < len(steps) < 4 * length


def test_register_after_dropped_content_is_useless_and_does_nothing():
    pool = make_pool()
    first, _ = allocate_chain(pool, HASHES[:2])
    pool.evict([first])
    (later,) = pool.allocate(1)
    pool.register(later, HASHES[2], parent=2)
    assert pool.block_hash(later) is None
    assert pool.lookup(HASHES[2]) is None


def test_register_needs_a_parent_that_is_held():
    pool = make_pool()
    allocate_chain(pool, HASHES[:1])
    pool.free([1])
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="parent=1 of block 2 is free: hold it, too"):
        pool.register(2, HASHES[1], parent=1)
    with pytest.raises(RuntimeError, match="block -1 cannot be held"):
        pool.register(2, HASHES[1], parent=-1)


def test_unregistered_content_is_gone_with_what_follows_and_the_blocks_stay_held():
    pool = make_pool()
    allocate_chain(pool, HASHES[:4])
    pool.free([4, 3])
    pool.unregister(2)
    assert [pool.lookup(block_hash) for block_hash in HASHES[:4]] == [1, None, None, None]
    assert pool.ref_count(2) == 1
    assert pool.num_free == 8
    assert sorted(pool.free_order()[:2]) == [3, 4]
    pool.register(2, HASHES[5], parent=1)
    assert pool.lookup(HASHES[5]) == 2


def test_unregistering_a_free_block_is_an_error():
    pool = make_pool()
    with pytest.raises(RuntimeError, match="block 1 is free: evict its content instead"):
        pool.unregister(1)


def test_what_follows_on_dropped_content_goes_even_if_a_duplicate_stays():
    # Its holder may not hold the duplicate, which could then become free before it does.
    pool = make_pool()
    allocate_chain(pool, HASHES[:2])
    allocate_chain(pool, HASHES[:1])
    pool.unregister(1)
    assert [pool.lookup(block_hash) for block_hash in HASHES[:2]] == [3, None]


def test_evicted_blocks_lose_content_where_they_are():
    pool = make_pool(6)
    allocate_chain(pool, HASHES[:3])
    pool.free([3])
    pool.evict([2, 3, 4])
    assert [pool.lookup(block_hash) for block_hash in HASHES[:3]] == [1, None, None]
    assert [pool.ref_count(block_id) for block_id in (1, 2, 3)] == [1, 1, 0]
    assert pool.free_order() == [3, 4, 5]
    with pytest.raises(RuntimeError, match="block 0 cannot be held"):
        pool.evict([NULL_BLOCK])


def test_pinned_blocks_are_no_victims_until_each_pin_is_taken_back():
    pool = make_pool(6)
    table = allocate_chain(pool, HASHES[:2])
    pool.pin(table)
    pool.pin(table[:1])
    pool.free(table[::-1])
    assert (pool.num_pinned, pool.num_free) == (2, 3)
    assert pool.allocate(3) == [3, 4, 5]
    assert not pool.reset_prefix_cache()
    pool.unpin(table)
    assert (pool.num_pinned, pool.num_free) == (1, 1)
    pool.unpin(table[:1])
    assert pool.free_order() == [2, 1]


def test_pins_cover_a_prefix_from_its_first_block_on():
    pool = make_pool()
    table = allocate_chain(pool, HASHES[:2])
    with pytest.raises(RuntimeError, match="block 2 follows on a block that is not pinned"):
        pool.pin([2])
    with pytest.raises(RuntimeError, match="block 3 is not cached: cannot pin it"):
        pool.pin([3])
    pool.pin(table)
    with pytest.raises(RuntimeError, match="block 2 would stay pinned without the block before it"):
        pool.unpin([1])
    with pytest.raises(RuntimeError, match="block 3 is not pinned"):
        pool.unpin([3])
    assert [pool.ref_count(block_id) for block_id in table] == [2, 2]
    pool.evict(table)
    pool.unpin([1])
    pool.unpin([2])
    assert pool.num_pinned == 0


def test_eviction_is_announced_once_a_content_has_no_block_left():
    pool = make_pool(4)
    allocate_cached(pool, [HASHES[0], HASHES[0], HASHES[1]])
    pool.free([1, 2, 3])
    calls, events = [], []
    pool.on_evict = lambda *call: calls.append(call)
    pool.events.subscribe(events.append)
    pool.allocate(1)
    assert (calls, events) == ([], [])
    pool.allocate(2)
    assert calls == [(2, HASHES[0]), (3, HASHES[1])]
    assert events == [BlockRemoved((HASHES[0], HASHES[1]))]


def test_removal_is_announced_by_group():
    pool = make_pool(4)
    pool.split_key = lambda key: (key[:-1], key[-1])
    allocate_cached(pool, [b"a\0", b"b\1", b"c\0"])
    events = []
    unsubscribe = pool.events.subscribe(events.append)
    pool.unregister(1)
    pool.evict([2])
    pool.free([3, 2, 1])
    pool.allocate(3)
    assert events == [
        BlockRemoved((b"a",), group=0),
        BlockRemoved((b"b",), group=1),
        BlockRemoved((b"c",), group=0),
    ]
    pool.free([1, 2, 3])
    unsubscribe()
    assert pool.reset_prefix_cache()
    assert len(events) == 3


def test_reset_is_announced():
    pool = make_pool(4)
    events = []
    pool.events.subscribe(events.append)
    assert pool.reset_prefix_cache()
    assert events == [AllBlocksCleared()]


def test_policy_serves_one_pool():
    policy = MRU()
    BlockPool(4, BLOCK_SIZE, policy=policy)
    with pytest.raises(RuntimeError, match="MRU serves another pool already; make a new one"):
        BlockPool(4, BLOCK_SIZE, policy=policy)
