"""`BlockPool`: ids, reference counts, order of reuse, contents."""

import logging

import pytest

from paged.scheduler.block_pool import BlockPool, FreeQueue

BLOCK_SIZE = 16
HASHES = [bytes([i]) * 32 for i in range(16)]


def make_pool(num_blocks: int = 11) -> BlockPool:
    return BlockPool(num_blocks, BLOCK_SIZE)


def allocate_cached(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.register(block_id, block_hash)
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


class EverythingToTheEnd(FreeQueue):
    """The rule of older vLLM releases, as an example of another policy."""

    def put_unhashed(self, block_ids):
        self.put_hashed(block_ids)


def test_order_of_reuse_is_exchangeable():
    pool = BlockPool(4, BLOCK_SIZE, free_queue=EverythingToTheEnd(4))
    pool.allocate(2)
    pool.free([2, 1])
    assert pool.free_order() == [3, 2, 1]


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
