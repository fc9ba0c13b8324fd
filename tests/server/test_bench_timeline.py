"""The arithmetic of latencies, against timelines whose answers are worked out by hand."""

import pytest

from paged.server.bench_names import METRICS
from paged.server.bench_timeline import (
    Timeline,
    latency_fields,
    peak_concurrency,
    peak_tokens_per_second,
)

STATISTICS = ("mean", "median", "std", "p50", "p95", "p99")


def timeline(sent: float, *arrivals: float, tokens: int | None = None) -> Timeline:
    return Timeline(
        num_prompt_tokens=4,
        num_output_tokens=len(arrivals) if tokens is None else tokens,
        sent=sent,
        arrivals=list(arrivals),
        finished=True,
    )


def test_latencies_of_one_request():
    request = timeline(10.0, 10.5, 10.75, 11.5)
    assert (request.ttft, request.e2el, request.tpot) == (0.5, 1.5, 0.5)
    assert request.itls == [0.25, 0.75]


def test_time_per_token_counts_tokens_and_not_the_pieces_they_came_in():
    assert timeline(0.0, 1.0, 2.0, tokens=5).tpot == 0.25


def test_single_token_has_no_time_per_further_token():
    assert timeline(0.0, 1.0).tpot is None
    assert timeline(0.0, 1.0).itls == []


def test_percentiles_lie_between_their_neighbours_in_proportion():
    # First tokens after 1, 2, ..., 5 s: rank 0.95 * 4 = 3.8 is 4.8 s, rank 3.96 is 4.96 s.
    fields = latency_fields([timeline(0.0, float(second)) for second in (5, 3, 1, 2, 4)])
    expected = {"mean": 3000, "median": 3000, "p50": 3000, "p95": 4800, "p99": 4960}
    for name, milliseconds in expected.items():
        assert fields[f"{name}_ttft_ms"] == pytest.approx(milliseconds)
    assert fields["std_ttft_ms"] == pytest.approx(1000 * 2**0.5)


def test_gaps_are_pooled_and_times_per_token_are_not():
    # One request with three gaps of 0.1 s, one with a single gap of 0.5 s.
    fields = latency_fields([timeline(0.0, 1.0, 1.1, 1.2, 1.3), timeline(0.0, 1.0, 1.5)])
    assert fields["mean_itl_ms"] == pytest.approx(200)
    assert fields["median_itl_ms"] == pytest.approx(100)
    assert fields["mean_tpot_ms"] == pytest.approx(300)


def test_every_statistic_of_every_metric_is_there_and_empty_ones_are_none():
    fields = latency_fields([timeline(0.0, 1.0)])
    assert set(fields) == {f"{s}_{m}_ms" for s in STATISTICS for m in METRICS}
    assert {name for name, value in fields.items() if value is None} == {
        f"{statistic}_{metric}_ms" for statistic in STATISTICS for metric in ("tpot", "itl")
    }


def test_peak_of_tokens_is_that_of_the_fullest_second():
    requests = [timeline(5.0, 5.5, 6.2, 6.9), timeline(6.0, 6.5, 8.0, tokens=4)]
    # Second 0: one token; second 1: two and half of four; second 3: two.
    assert peak_tokens_per_second(requests) == 4.0


def test_peak_of_requests_counts_those_of_one_moment():
    requests = [timeline(0.0, 2.0), timeline(1.0, 3.0), timeline(2.0, 4.0), timeline(9.0, 9.5)]
    assert peak_concurrency(requests) == 2


def test_further_percentiles_come_beside_those_that_are_always_there():
    fields = latency_fields(
        [timeline(0.0, float(second)) for second in range(1, 1002)], (99.9, 50, 10)
    )
    assert fields["p10_ttft_ms"] == pytest.approx(101_000)
    assert fields["p99.9_ttft_ms"] == pytest.approx(1_000_000)
    names = {f"{s}_{m}_ms" for s in (*STATISTICS, "p10", "p99.9") for m in METRICS}
    assert set(fields) == names
