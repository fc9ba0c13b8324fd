"""Every step the scheduler may form has a shape, and there are few shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.scheduler.buckets import FEW_SEQS, Bucket, BucketTable

# Steps up to this many tokens may share one shape.
SMALLEST_PADDED = 33


@given(st.data())
def test_every_step_within_the_limits_fits_a_bucket(data):
    max_num_seqs = data.draw(st.integers(1, 1024))
    budget = data.draw(st.integers(max_num_seqs, 16384))
    is_fine = data.draw(st.booleans())
    table = BucketTable(
        max_num_seqs, budget, min_rows=data.draw(st.sampled_from([1, 8])), is_fine=is_fine
    )
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    num_tokens = data.draw(st.integers(num_seqs, budget))
    bucket = table.pick(num_tokens, num_seqs)
    assert bucket.num_tokens >= num_tokens
    assert bucket.num_seqs >= num_seqs
    # Padding stays below twice the tokens, whatever the step is made of.
    factor = 1.5 if is_fine else 2
    assert bucket.num_tokens < factor * max(num_tokens, SMALLEST_PADDED)


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("min_rows", [1, 8])
def test_every_step_within_small_limits_fits_a_bucket(min_rows: int, is_fine: bool):
    # All of them: random limits are hardly ever this small.
    for max_num_seqs in range(1, 41):
        for budget in range(max_num_seqs, 73):
            table = BucketTable(max_num_seqs, budget, min_rows=min_rows, is_fine=is_fine)
            bucket = table.pick(budget, max_num_seqs)
            assert bucket.num_tokens >= budget
            assert bucket.num_seqs >= max_num_seqs
            assert table.pick(budget, 1).num_tokens >= budget


@given(st.data())
def test_every_step_finds_the_programs_that_follow_its_bucket(data):
    max_num_seqs = data.draw(st.integers(1, 300))
    budget = data.draw(st.integers(max_num_seqs, 4096))
    table = BucketTable(
        max_num_seqs,
        budget,
        min_rows=data.draw(st.sampled_from([1, 8])),
        is_fine=data.draw(st.booleans()),
    )
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    bucket = table.pick(data.draw(st.integers(num_seqs, budget)), num_seqs)
    for is_greedy, sizes in ((True, table.greedy_sizes), (False, table.sample_sizes)):
        size = table.pick_head(bucket, num_seqs, is_greedy=is_greedy)
        assert size in sizes
        assert size >= num_seqs
        assert size == bucket.num_seqs or (bucket.num_seqs, size) in table.resizes


@pytest.mark.parametrize(
    ("max_num_seqs", "budget"),
    [(128, 2048), (256, 4096), (16, 64), (1, 2048), (8, 8), (1024, 8192)],
)
def test_usual_limits_need_few_shapes(max_num_seqs, budget):
    assert len(BucketTable(max_num_seqs, budget).buckets) <= 16
    fine = BucketTable(max_num_seqs, budget, min_rows=1, is_fine=True)
    assert len(fine.buckets) <= 36


def test_the_default_limits_on_a_cpu_need_eleven_shapes_and_a_single_row():
    assert len(BucketTable(128, 2048).buckets) == 11
    assert len(BucketTable(128, 2048, min_rows=1).buckets) == 12


def test_pure_decode_steps_have_as_many_tokens_as_sequences():
    table = BucketTable(128, 2048)
    assert table.pick(100, 100) == Bucket(128, 128)
    assert table.pick(1, 1) == Bucket(8, 8)


def test_where_a_row_costs_less_than_eight_a_single_user_pays_for_one():
    table = BucketTable(128, 2048, min_rows=1)
    bucket = table.pick(1, 1)
    assert bucket == Bucket(1, 1)
    assert table.pick_head(bucket, 1, is_greedy=True) == 1
    # The sampler is not compiled for less than eight.
    assert table.pick_head(bucket, 1, is_greedy=False) == 8
    assert table.pick(2, 2) == Bucket(8, 8)
    assert BucketTable(128, 2048, min_rows=1, is_fine=True).pick(2, 2) == Bucket(2, 2)


def test_one_prefill_does_not_pay_for_the_tokens_of_every_sequence():
    table = BucketTable(128, 2048)
    bucket = table.pick(2000, 1)
    assert bucket == Bucket(2048, 128)
    assert table.pick_head(bucket, 1, is_greedy=True) == FEW_SEQS
    assert table.pick_head(bucket, 20, is_greedy=True) == 32


def test_step_beyond_the_limits_is_refused():
    with pytest.raises(ValueError, match="2049 tokens and 1 sequences exceeds the largest bucket"):
        BucketTable(128, 2048).pick(2049, 1)


def test_budget_below_the_sequences_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 must be at least"):
        BucketTable(8, 4)
