"""Percentiles of counted times, against numpy on the list with repetitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.scheduler.simulator.latency import LatencyRecorder, LatencySummary

TIMES = st.lists(
    st.tuples(st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0]), st.integers(1, 20)), min_size=1
)


def record(times) -> LatencyRecorder:
    recorder = LatencyRecorder()
    for seconds, count in times:
        recorder.add(seconds, count)
    return recorder


@given(times=TIMES)
def test_summary_is_that_of_numpy(times):
    summary = record(times).summary()
    repeated = np.repeat([seconds for seconds, _ in times], [count for _, count in times])
    expected = np.percentile(repeated, [50, 90, 99])
    assert [summary.p50, summary.p90, summary.p99] == pytest.approx(expected.tolist())
    assert summary.mean == pytest.approx(repeated.mean())


@given(times=TIMES)
def test_cdf_counts_what_is_at_most_that_long(times):
    values, shares = record(times).cdf()
    repeated = np.repeat([seconds for seconds, _ in times], [count for _, count in times])
    assert values.tolist() == sorted(set(repeated.tolist()))
    assert shares.tolist() == pytest.approx([(repeated <= value).mean() for value in values])


def test_summary_of_nothing_is_zero():
    assert LatencyRecorder().summary() == LatencySummary(0.0, 0.0, 0.0, 0.0)
