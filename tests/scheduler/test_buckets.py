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
    table = BucketTable(max_num_seqs, budget)
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    num_tokens = data.draw(st.integers(num_seqs, budget))
    bucket = table.pick(num_tokens, num_seqs)
    assert bucket.num_tokens >= num_tokens
    assert bucket.num_seqs >= num_seqs
    # Padding stays below twice the tokens of a prompt or of a pure decode, four times of a mix.
    factor = 2 if num_seqs <= FEW_SEQS or num_seqs == num_tokens else 4
    assert bucket.num_tokens < factor * max(num_tokens, SMALLEST_PADDED)


@pytest.mark.parametrize(
    ("max_num_seqs", "budget"), [(128, 2048), (256, 4096), (16, 64), (1, 2048), (8, 8)]
)
def test_usual_limits_need_about_twenty_shapes_at_most(max_num_seqs, budget):
    assert len(BucketTable(max_num_seqs, budget).buckets) <= 20


def test_pure_decode_steps_have_as_many_tokens_as_sequences():
    table = BucketTable(128, 2048)
    assert table.pick(100, 100) == Bucket(128, 128)
    assert table.pick(1, 1) == Bucket(8, 8)


def test_one_prefill_does_not_pay_for_every_sequence():
    assert BucketTable(128, 2048).pick(2000, 1) == Bucket(2048, 8)


def test_step_beyond_the_limits_is_refused():
    with pytest.raises(ValueError, match="2049 tokens and 1 sequences exceeds the largest bucket"):
        BucketTable(128, 2048).pick(2049, 1)


def test_budget_below_the_sequences_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 must be at least"):
        BucketTable(8, 4)
