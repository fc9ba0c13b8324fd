"""How long blocks stay, on a clock of the test's own."""

import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.block_residency import BlockResidency, ResidencySampler
from tests.scheduler.test_block_pool import BLOCK_SIZE, HASHES, allocate_cached


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def followed_pool(num_blocks: int = 3, **settings) -> tuple[BlockPool, Clock]:
    clock = Clock()
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    pool.residency = ResidencySampler(1.0, clock=clock, **settings)
    return pool, clock


def test_stay_lasts_from_allocation_until_others_get_the_block():
    pool, clock = followed_pool()
    block_ids = allocate_cached(pool, HASHES[:2])
    clock.now += 4
    pool.free(block_ids[::-1])
    for seconds in (1, 2, 5):  # hits at 105, 107 and 112, of the first block
        clock.now += seconds
        pool.touch(block_ids[:1])
        pool.free(block_ids[:1])
    clock.now += 8
    assert pool.residency.take() == ()
    pool.allocate(2)
    assert sorted(pool.residency.take()) == [
        BlockResidency(20.0, 8.0, (2.0, 5.0)),
        BlockResidency(20.0, 20.0, ()),
    ]
    assert pool.residency.take() == ()


def test_only_the_last_three_gaps_are_kept():
    pool, clock = followed_pool(2)
    (block_id,) = allocate_cached(pool, HASHES[:1])
    for seconds in (1, 2, 3, 4, 5, 6):
        clock.now += seconds
        pool.touch([block_id])
        pool.free([block_id])
    pool.free([block_id])
    pool.allocate(1)
    assert pool.residency.take() == (BlockResidency(21.0, 0.0, (4.0, 5.0, 6.0)),)


def test_content_that_is_dropped_ends_its_stay_and_a_reset_forgets_all():
    pool, clock = followed_pool()
    block_ids = allocate_cached(pool, HASHES[:2])
    clock.now += 3
    pool.evict(block_ids[:1])
    assert pool.residency.take() == (BlockResidency(3.0, 3.0, ()),)
    pool.free(block_ids)
    assert pool.reset_prefix_cache()
    pool.allocate(2)
    assert pool.residency.take() == ()


def test_a_share_of_the_allocations_is_followed():
    draws = iter([0.3, 0.2, 0.9, 0.1])
    clock = Clock()
    pool = BlockPool(5, BLOCK_SIZE)
    pool.residency = ResidencySampler(0.25, clock=clock, draw=lambda: next(draws))
    pool.free(pool.allocate(4))
    pool.residency.on_evict(range(1, 5))
    assert len(pool.residency.take()) == 2


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"share=.* must be above 0 and at most 1"):
        ResidencySampler(share)
