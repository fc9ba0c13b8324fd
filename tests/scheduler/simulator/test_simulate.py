"""Whole simulations: reference numbers, times by hand, memory by hand, conservation of tokens."""

import numpy as np
import pytest

from paged.scheduler.errors import CapacityError
from paged.scheduler.simulator.arrivals import sharegpt
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.conversation_traces import chat
from paged.scheduler.simulator.document_traces import cyclic, sawtooth
from paged.scheduler.simulator.pools import num_queued
from paged.scheduler.simulator.result import SimulationResult
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.step_cost import StepLoad
from paged.scheduler.simulator.trace import Trace, TraceRequest


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("by hand", lambda: iter(requests), len(requests))


def prompt(name: str, num_tokens: int, output_tokens: int = 1, **fields) -> TraceRequest:
    return TraceRequest(((name, num_tokens),), output_tokens, **fields)


def hits(result: SimulationResult) -> list[int]:
    return [stats.hit_tokens for stats in result.passes]


class CostOfTokens:
    """A step takes 10 ms and 1 ms per token."""

    name = "by hand"

    def step_seconds(self, load: StepLoad) -> float:
        return 0.010 + 0.001 * load.num_tokens


# The experiment of the block pool's tests: ten documents, one at a time, 1,344 blocks of 16. LRU's
# numbers were measured with vLLM; 21,488 of 50,240 tokens per pass is the optimum of a linear
# program, so that neither Belady's rule nor another policy can have more.
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [0, 0, 21488]),
        ("mru", [0, 21488, 21488]),
        ("lip", [0, 16464, 16464]),
        ("lookahead:8", [0, 21488, 21488]),
        ("optimal", [0, 21488, 21488]),
    ],
)
def test_hits_of_the_reference_experiment(policy: str, expected: list[int]):
    config = SimulationConfig(num_blocks=1345, policy=policy, concurrency=1)
    result = simulate(cyclic(), config)
    assert hits(result) == expected
    assert [stats.prompt_tokens for stats in result.passes] == [50_330] * 3
    assert result.hit_rate == sum(expected) / 150_990


@pytest.mark.parametrize(("output_tokens", "expected"), [(16, 21360), (64, 20976)])
def test_outputs_take_room_from_prefixes(output_tokens: int, expected: int):
    config = SimulationConfig(num_blocks=1345, concurrency=1, policy="lru")
    assert hits(simulate(cyclic(output_tokens=output_tokens), config)) == [0, 0, expected]


@pytest.mark.parametrize("documents", [3, 10])
def test_everything_hits_where_everything_fits(documents: int):
    config = SimulationConfig(num_blocks=documents * 314 + 2, concurrency=1)
    trace = cyclic(documents=documents, passes=3)
    assert hits(simulate(trace, config)) == [0, documents * 5024, documents * 5024]


@pytest.mark.parametrize("policy", ["lru", "mru", "lip", "lookahead:8"])
def test_no_policy_beats_the_optimum(policy: str):
    for trace in (cyclic(passes=6), sawtooth(passes=6)):
        config = SimulationConfig(num_blocks=1345, concurrency=1, policy="optimal")
        best = simulate(trace, config).hit_tokens
        config = SimulationConfig(num_blocks=1345, concurrency=1, policy=policy)
        assert simulate(trace, config).hit_tokens <= best


def test_without_prefix_caching_nothing_hits():
    config = SimulationConfig(num_blocks=5000, concurrency=1, enable_prefix_caching=False)
    assert simulate(cyclic(), config).hit_tokens == 0


def test_next_turn_hits_the_answer_of_the_last_one():
    answer = TraceRequest((("system", 40),), 60, output="answer")
    follow = TraceRequest((("system", 40), ("answer", 60), ("user", 5)), 1, pass_index=1)
    config = SimulationConfig(num_blocks=100, concurrency=1)
    # 99 tokens were computed, as the last one of an answer never is: six full blocks.
    assert hits(simulate(trace_of(answer, follow), config)) == [0, 96]


# Times, with one step per second.
def test_times_of_an_open_loop_by_hand():
    trace = trace_of(
        prompt("a", 10, 3),
        prompt("b", 10, 1, arrival_seconds=0.5),
        prompt("c", 10, 2, arrival_seconds=8.0),
    )
    result = simulate(trace, SimulationConfig(num_blocks=100))
    # a: steps 1 to 3; b enters step 2; nobody is there from 3 to 8; c: steps from 8 to 10.
    assert result.steps.column("start_seconds").tolist() == [0, 1, 2, 8, 9]
    assert result.steps.column("num_running").tolist() == [1, 2, 1, 1, 1]
    assert result.duration_seconds == 10
    for name, expected in (
        ("ttft", [1.0, 1.5, 1.0]),
        ("itl", [1.0, 1.0, 1.0]),
        ("tpot", [1.0, 1.0]),
        ("e2e", [3.0, 1.5, 2.0]),
    ):
        values, shares = result.latencies[name].cdf()
        assert values.tolist() == sorted(set(expected)), name
        assert shares.tolist() == [
            sum(x <= value for x in expected) / len(expected) for value in values
        ]


def test_latency_percentiles_of_a_trace_by_hand():
    trace = trace_of(*[prompt(f"{i}", 100 * (i + 1), 5) for i in range(4)])
    result = simulate(trace, SimulationConfig(num_blocks=1000, concurrency=1), CostOfTokens())
    # One after the other: a prefill of n tokens and four decodes.
    ttft = [0.010 + 0.1 * (i + 1) for i in range(4)]
    e2e = [seconds + 4 * 0.011 for seconds in ttft]
    for name, expected in (("ttft", ttft), ("e2e", e2e), ("itl", [0.011] * 16)):
        summary = result.latency(name)
        assert [summary.p50, summary.p90, summary.p99] == pytest.approx(
            np.percentile(expected, [50, 90, 99]).tolist()
        )
        assert summary.mean == pytest.approx(np.mean(expected))
    assert result.duration_seconds == pytest.approx(sum(e2e))
    assert result.per_second(result.totals.output_tokens) == pytest.approx(20 / sum(e2e))


def test_closed_loop_keeps_its_number_of_requests_in_service():
    trace = trace_of(*[prompt(f"{i}", 10, 5, arrival_seconds=1000.0 * i) for i in range(6)])
    result = simulate(trace, SimulationConfig(num_blocks=100, concurrency=2))
    assert result.steps.column("num_running").tolist() == [2] * 15
    assert result.steps.column("num_waiting").tolist() == [0] * 15


def test_closed_loop_queues_what_the_policy_looks_ahead_to():
    for policy, expected in (("lru", 0), ("lookahead:3", 3), ("lookahead", 32)):
        assert num_queued(SimulationConfig(num_blocks=10, policy=policy)) == expected
    assert num_queued(SimulationConfig(num_blocks=10, policy="lookahead:3", num_queued=7)) == 7
    trace = trace_of(*[prompt(f"{i}", 10, 1) for i in range(6)])
    config = SimulationConfig(num_blocks=100, concurrency=1, policy="lookahead:3")
    assert simulate(trace, config).steps.column("num_waiting").tolist() == [3, 3, 3, 2, 1, 0]


def test_urgent_requests_are_served_first_where_the_policy_looks_at_priorities():
    trace = trace_of(prompt("a", 10, 4), prompt("b", 10, 6, priority=1), prompt("c", 10, 2))
    for policy, expected in (("fcfs", [4, 10, 12]), ("priority", [4, 6, 12])):
        config = SimulationConfig(100, max_num_seqs=1, scheduling_policy=policy)
        result = simulate(trace, config)
        assert result.latencies["e2e"].cdf()[0].tolist() == expected


# Memory.
def test_occupancy_and_waste_by_hand():
    trace = trace_of(prompt("a", 100, 14))
    result = simulate(trace, SimulationConfig(num_blocks=15, concurrency=1))
    # 100 tokens in 7 blocks waste 12 slots; each decode fills one, the 13th needs a new block.
    assert result.steps.column("used_blocks").tolist() == [7] * 13 + [8]
    assert result.steps.column("wasted_slots").tolist() == [*range(12, -1, -1), 15]
    assert result.steps.mean_usage() == pytest.approx((13 * 7 + 8) / 14 / 14)
    waste = [*[slots / 112 for slots in range(12, -1, -1)], 15 / 128]
    assert result.steps.mean_waste() == pytest.approx(np.mean(waste))


def test_shared_blocks_are_counted_once():
    trace = trace_of(prompt("a", 100, 2), prompt("a", 100, 2))
    result = simulate(trace, SimulationConfig(num_blocks=100, concurrency=2))
    # Six full blocks shared, one partial block each with 4 tokens, then 5.
    assert result.steps.column("used_blocks").tolist() == [8, 8]
    assert result.steps.column("wasted_slots").tolist() == [24, 22]


@pytest.mark.parametrize("skip_decodes", [True, False])
def test_every_token_is_computed_once_unless_hit_or_preempted(skip_decodes: bool):
    for trace, num_blocks in ((sharegpt(300, 50.0), 200), (chat(sessions=30), 2000)):
        result = simulate(trace, SimulationConfig(num_blocks, skip_decodes=skip_decodes))
        needed = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace)
        totals = result.totals
        assert totals.num_finished == trace.num_requests
        assert totals.output_tokens == sum(r.output_tokens for r in trace)
        assert totals.computed_tokens == needed - result.hit_tokens + totals.recomputed_tokens
        assert totals.computed_tokens == result.steps.column("num_tokens").sum()
        assert (totals.num_preemptions > 0) == (totals.recomputed_tokens > 0)
        assert totals.num_preemptions == result.steps.column("num_preempted").sum()
        used = result.steps.column("used_blocks")
        assert used.max() <= num_blocks - 1
        assert result.steps.column("wasted_slots").min() >= 0


def test_preempted_request_counts_what_it_computes_again():
    # Six blocks: both prompts fill four, and the first output block of each the rest.
    trace = trace_of(prompt("a", 30, 40), prompt("b", 30, 40))
    config = SimulationConfig(7, concurrency=2, enable_prefix_caching=False)
    result = simulate(trace, config)
    assert result.totals.num_preemptions == 1
    # b has 48 tokens computed when a needs a fourth block.
    assert result.totals.recomputed_tokens == 48
    assert result.totals.computed_tokens == 2 * 69 + 48


# What cannot be served.
def test_prompts_that_can_never_fit_are_left_out_and_counted():
    trace = trace_of(prompt("a", 160), prompt("b", 159), prompt("c", 500))
    result = simulate(trace, SimulationConfig(num_blocks=11, concurrency=1))
    assert (result.totals.num_rejected, result.totals.num_finished) == (2, 1)


def test_output_that_reaches_the_longest_length_is_cut_and_counted():
    trace = trace_of(prompt("a", 90, 20), prompt("b", 90, 10))
    result = simulate(trace, SimulationConfig(num_blocks=11, concurrency=1, max_model_len=100))
    assert result.totals.num_truncated == 1
    assert result.totals.output_tokens == 20


def test_empty_trace_gives_an_empty_result():
    result = simulate(trace_of(), SimulationConfig(num_blocks=10))
    assert (result.num_requests, result.hit_rate, result.duration_seconds) == (0, 0.0, 0.0)
    assert result.to_dict()["mean_kv_usage"] == result.to_dict()["requests_per_second"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "num_blocks=1 must be at least 2"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"num_queued": -1}, "num_queued=-1 must be at least 0"),
        ({"policy": "fifo"}, "policy 'fifo' is unknown; choose from lru, .*optimal"),
        ({"policy": "lru:8"}, "policy 'lru:8': only lookahead, bip take an option"),
        ({"policy": "lookahead:0"}, "policy 'lookahead:0': window=0 must be at least 1"),
        ({"policy": "bip:x"}, "policy 'bip:x': could not convert"),
    ],
)
def test_impossible_settings_are_refused(settings, message: str):
    with pytest.raises(ValueError, match=message):
        simulate(cyclic(), SimulationConfig(**{"num_blocks": 100} | settings))


def test_longest_length_beyond_the_pool_is_refused():
    with pytest.raises(CapacityError, match="needs 10 KV blocks of 16 tokens"):
        simulate(cyclic(), SimulationConfig(num_blocks=10, max_model_len=160))


def test_result_as_a_dictionary_and_as_a_row():
    result = simulate(
        cyclic(documents=2, passes=2), SimulationConfig(1000, policy="lru", concurrency=1)
    )
    found = result.to_dict()
    assert found["passes"][1] == {
        "num_requests": 2, "prompt_tokens": 10_066, "hit_tokens": 10_048,
    }  # fmt: skip
    assert (found["trace"], found["policy"], found["device"]) == ("cyclic", "lru", "steps")
    row = result.to_row()
    assert (row["hit_tokens_0"], row["hit_tokens_1"]) == (0, 10_048)
    assert row["ttft_p50"] == found["ttft"]["p50"]
    assert not [value for value in row.values() if isinstance(value, dict | list)]


def test_progress_bar_is_shown_on_request(capsys):
    simulate(cyclic(), SimulationConfig(1345, concurrency=1), progress=True)
    assert "30/30" in capsys.readouterr().err
    simulate(cyclic(), SimulationConfig(1345, concurrency=1))
    assert capsys.readouterr().err == ""


def test_unknown_column_of_the_steps_is_refused():
    result = simulate(cyclic(passes=1), SimulationConfig(1345, concurrency=1))
    with pytest.raises(KeyError, match="'temperature' is no column; there are start_seconds"):
        result.steps.column("temperature")


def test_many_requests_are_served_as_a_stream():
    read_at_step: list[int] = []
    read = 0

    def generate():
        nonlocal read
        for read in range(1, 20_001):
            yield prompt(f"doc-{read % 50}", 64, 4)

    class Watch(CostOfTokens):
        def step_seconds(self, load: StepLoad) -> float:
            read_at_step.append(read)
            return super().step_seconds(load)

    config = SimulationConfig(num_blocks=150, concurrency=8)
    result = simulate(Trace("many", generate, 20_000), config, Watch())
    assert result.totals.num_finished == 20_000
    assert result.totals.output_tokens == 80_000
    # Eight in service and the next one.
    assert read_at_step[0] == 9
    assert max(np.diff(read_at_step)) <= 8
