"""Built-in traces: order, sharing, arrivals, lengths, seeds; read as streams."""

import itertools

import numpy as np
import pytest

from paged.scheduler.simulator.arrivals import (
    LengthDistribution,
    arrival_times,
    sharegpt,
    with_arrivals,
)
from paged.scheduler.simulator.conversation_traces import agent_tree, chat
from paged.scheduler.simulator.document_traces import cyclic, sawtooth, scan, working_set, zipf
from paged.scheduler.simulator.traces import TRACES, make_trace


def documents(trace) -> list[str]:
    return [request.prompt[0][0] for request in trace]


def test_cyclic_reads_all_documents_forward_or_in_reverse():
    trace = cyclic(documents=3, document_tokens=50, passes=("forward", "reverse"))
    assert documents(trace) == ["doc-0", "doc-1", "doc-2", "doc-2", "doc-1", "doc-0"]
    assert [request.pass_index for request in trace] == [0, 0, 0, 1, 1, 1]
    assert {request.prompt_tokens for request in trace} == {50}
    assert documents(cyclic(documents=2, passes=2)) == ["doc-0", "doc-1"] * 2


def test_sawtooth_turns_round_after_each_pass():
    trace = sawtooth(documents=2, passes=3)
    assert documents(trace) == ["doc-0", "doc-1", "doc-1", "doc-0", "doc-0", "doc-1"]
    assert trace.name == "sawtooth"


def test_zipf_draws_by_rank():
    counts = np.bincount(
        [int(name.removeprefix("doc-")) for name in documents(zipf(num_requests=20_000))]
    )
    weights = 1 / np.arange(1, 41)
    # Three standard deviations of the rarest document are a quarter of its expectation.
    np.testing.assert_allclose(counts / 20_000, weights / weights.sum(), rtol=0.3)


def test_scan_asks_for_every_cold_document_once():
    names = documents(scan(num_requests=2000, hot_share=0.5))
    cold = [name for name in names if name.startswith("once")]
    assert len(set(cold)) == len(cold)
    assert set(names) - set(cold) == {"hot-0", "hot-1"}
    assert 900 < len(cold) < 1100


def test_working_set_changes_as_a_whole():
    names = documents(working_set(size=4, requests_per_set=10, num_requests=30))
    sets = [set(names[start : start + 10]) for start in (0, 10, 20)]
    assert [len(names) for names in sets] == [4, 4, 4]
    assert not sets[0] & sets[1]


def test_a_turn_of_a_chat_repeats_all_that_was_said_and_answered():
    said: dict[int | str | None, tuple] = {}
    trace = chat(sessions=20, turns=3)
    for request in trace:
        before = said.get(request.session, (("system", 500),))
        assert request.prompt[:-1] == before
        said[request.session] = (*request.prompt, (request.output, request.output_tokens))
    assert len(said) == 20
    assert len(list(trace)) == trace.num_requests == 60


def test_a_node_of_an_agent_tree_continues_its_parent():
    trace = agent_tree(tasks=3, depth=3, branching=2, tasks_at_once=2)
    requests = list(trace)
    assert len(requests) == trace.num_requests == 3 * 7
    known = {
        (*request.prompt, (request.output, request.output_tokens))
        for request in requests
        if request.pass_index < 2
    }
    for request in requests:
        assert len(request.prompt) == 2 + 2 * request.pass_index
        if request.pass_index:
            assert request.prompt[:-1] in known
    assert {request.session for request in requests[:14]} == {0, 1}


def test_arrivals_have_the_rate_and_the_spread_asked_for():
    for burstiness in (1.0, 0.25):
        times = np.array(list(itertools.islice(arrival_times(5.0, burstiness), 50_000)))
        gaps = np.diff(times, prepend=0.0)
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_rate_lets_all_arrive_at_once():
    assert {request.arrival_seconds for request in sharegpt(50, request_rate=float("inf"))} == {0.0}


def test_lengths_have_the_mean_asked_for_and_stay_within_their_bounds():
    wide = LengthDistribution(mean=300.0, sigma=1.0, minimum=1, maximum=10**9)
    drawn = wide.draw(np.random.default_rng(0), 100_000)
    assert np.mean(drawn) == pytest.approx(300, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(1.0, rel=0.03)
    narrow = LengthDistribution(mean=300.0, sigma=1.0, minimum=100, maximum=500)
    drawn = narrow.draw(np.random.default_rng(0), 1000)
    assert (min(drawn), max(drawn)) == (100, 500)


def test_new_arrivals_leave_the_requests_as_they_are():
    trace = with_arrivals(cyclic(documents=3, passes=1), request_rate=2.0)
    assert documents(trace) == ["doc-0", "doc-1", "doc-2"]
    assert trace.has_arrivals
    times = [request.arrival_seconds for request in trace]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("name", TRACES)
def test_trace_can_be_read_twice_and_comes_in_order_of_arrival(name: str):
    trace = make_trace(name)
    requests = list(trace)
    assert requests == list(trace)
    assert len(requests) == trace.num_requests
    times = [request.arrival_seconds for request in requests]
    assert times == sorted(times)
    assert trace.has_arrivals == (len(set(times)) > 1)


@pytest.mark.parametrize("name", ["zipf", "scan", "working-set", "chat", "poisson", "bursty"])
def test_seed_changes_the_draws(name: str):
    assert list(make_trace(name, seed=1)) != list(make_trace(name, seed=2))


def test_first_requests_of_a_long_trace_need_no_others():
    for trace in (sharegpt(10**9), chat(sessions=10**9), zipf(num_requests=10**9)):
        assert len(list(itertools.islice(trace, 100))) == 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cyclic(passes=("sideways",)), "'sideways'; each must be one of forward, reverse"),
        (lambda: cyclic(documents=0), "num_requests=0 of the trace 'cyclic' must be at least 1"),
        (lambda: cyclic(document_tokens=0), "document_tokens=0"),
        (lambda: scan(hot_share=1.5), "hot_share=1.5 must be in 0 to 1"),
        (lambda: chat(turns=0), "turns=0 must be at least 1"),
        (lambda: agent_tree(depth=0), "depth=0 must be at least 1"),
        (lambda: sharegpt(0), "num_requests=0 must be at least 1"),
        (lambda: list(sharegpt(request_rate=0.0)), "request_rate=0.0 must be greater than 0"),
        (lambda: arrival_times(1.0, -1.0), "burstiness=-1.0 must be greater than 0"),
        (lambda: LengthDistribution(0.0, 1.0), "mean=0.0 must be positive"),
        (lambda: make_trace("spiral"), "'spiral' is unknown; built in are cyclic"),
        (lambda: make_trace("chat", documents=3), "'chat' has no documents; it has sessions"),
    ],
)
def test_impossible_trace_is_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
