"""Leaving decode rows out of steps changes nothing: whole simulations, number by number."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.scheduler.simulator.arrivals import sharegpt
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.conversation_traces import chat
from paged.scheduler.simulator.document_traces import cyclic
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.step_cost import StepLoad
from paged.scheduler.simulator.step_log import COLUMNS
from paged.scheduler.simulator.trace import Trace, TraceRequest


class CostOfEverything:
    """Depends on all four numbers of a load, so that none can be wrong unseen."""

    name = "test"

    def step_seconds(self, load: StepLoad) -> float:
        tokens, samples, pairs, context = load
        return 0.01 + 1e-3 * tokens + 3e-4 * samples + 1e-6 * pairs + 1e-5 * context


def outcome(trace: Trace, config: SimulationConfig) -> tuple:
    """Every step and every figure, without rounding."""
    result = simulate(trace, config, CostOfEverything())
    steps = [result.steps.column(name).tolist() for name, _ in COLUMNS]
    times = [[column.tolist() for column in recorder.cdf()] for recorder in
             result.latencies.values()]  # fmt: skip
    return steps, times, result.to_dict()


REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        prompt=st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=2
        ).map(tuple),
        output_tokens=st.integers(1, 40),
        arrival_seconds=st.floats(0, 1),
        output=st.sampled_from(["a", "x", None]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(16, 60),
    block_size=st.sampled_from([1, 2, 4, 7]),
    policy=st.sampled_from(["lru", "mru", "lookahead:2"]),
    concurrency=st.sampled_from([None, 1, 3]),
    budget=st.integers(8, 64),
    chunked=st.booleans(),
    caching=st.booleans(),
)
def test_any_simulation_is_the_same_step_by_step(
    requests, num_blocks, block_size, policy, concurrency, budget, chunked, caching
):
    requests = sorted(requests, key=lambda request: request.arrival_seconds)
    trace = Trace("random", lambda: iter(requests), len(requests))
    config = SimulationConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        policy=policy,
        concurrency=concurrency,
        max_num_seqs=8,
        max_num_batched_tokens=budget if chunked else 60 * 7,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
    )
    stepped = outcome(trace, dataclasses.replace(config, skip_decodes=False))
    assert outcome(trace, config) == stepped


@pytest.mark.parametrize(
    ("trace", "num_blocks"),
    [(sharegpt(200, 60.0), 300), (chat(20), 400), (cyclic(4, 300, 4, output_tokens=50), 60)],
    ids=["preempting", "chat", "documents"],
)
def test_realistic_simulation_is_the_same_step_by_step(trace: Trace, num_blocks: int):
    config = SimulationConfig(num_blocks)
    stepped = outcome(trace, dataclasses.replace(config, skip_decodes=False))
    assert outcome(trace, config) == stepped


@pytest.mark.parametrize(
    "limits", [{"long_prefill_token_threshold": 64}, {"scheduling_policy": "priority"}]
)
def test_rows_stay_in_every_step_where_order_depends_on_more(limits):
    config = SimulationConfig(300, **limits)
    trace = Trace(
        "by priority",
        lambda: (
            dataclasses.replace(request, priority=index % 3)
            for index, request in enumerate(sharegpt(100, 60.0))
        ),
    )
    stepped = outcome(trace, dataclasses.replace(config, skip_decodes=False))
    assert outcome(trace, config) == stepped
