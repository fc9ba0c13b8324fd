"""Steps that are started before the results of earlier ones are read give the same tokens.

The steps are planned here, not by a scheduler, so that their batches are the same whatever the
depth of the pipeline: tokens and log probabilities must be equal bit by bit.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.loading import load_engine
from paged.scheduler.output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.runner import DeviceStep, ModelRunner

BLOCK_SIZE, BLOCKS_PER_REQUEST, CHUNK = 8, 10, 12
NUM_NEW_TOKENS = 24
VERSIONS = itertools.count(10**6)  # not those of the engine that shares the runner

# Prompts and parameters; penalties read the history on the device, which in-flight tokens enter.
CASES = [
    (range(40, 70), {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 3}),
    (range(90, 95), {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.6, "top_p": 0.9}),
    ([99], {"temperature": 0.8, "seed": 8, "presence_penalty": 1.5, "logprobs": 1}),
    (range(100, 117), {"temperature": 0, "min_tokens": 9, "stop_token_ids": range(3, 60)}),
    (range(60, 80), {"temperature": 1.3, "seed": 9, "logit_bias": {77: 4.0}, "min_p": 0.02}),
]


@dataclass
class Run:
    """A request, the tokens promised to it and what it got."""

    request: Request
    entry: int  # the step in which it starts
    num_promised: int = 0  # samples started
    logprobs: list[np.ndarray] = field(default_factory=list)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tiny_config: EngineConfig) -> Iterator[Engine]:
    engine = load_engine(str(tiny_model), tiny_config, progress=False).engine
    yield engine
    engine.close()


def make_runs(engine: Engine) -> list[Run]:
    runs = []
    for row, (prompt, fields) in enumerate(CASES):
        params = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **fields)
        (request,) = engine.processor.process(f"r{row}", list(prompt), params)
        request.batch_row = len(CASES) - row  # not the order of the batch
        runs.append(Run(request, entry=2 * row))
    return runs


def give_blocks(request: Request, first: int) -> None:
    request.block_tables[0] = list(range(first, first + BLOCKS_PER_REQUEST))
    request.table_version = next(VERSIONS)


def plan(run: Run) -> ScheduledRequest:
    """The next tokens of a request that knows, or is promised, `num_prompt + num_promised`."""
    request = run.request
    total = request.num_prompt_tokens + run.num_promised
    start = request.num_computed_tokens
    num_tokens = min(CHUNK, total - start)
    samples = start + num_tokens == total
    run.num_promised += samples
    request.num_computed_tokens += num_tokens
    in_flight = samples and total > request.num_tokens
    return ScheduledRequest(request, start, num_tokens, samples, in_flight)


def retire(runs: list[Run], scheduled: list[ScheduledRequest], result: ModelRunnerOutput) -> None:
    by_request = {id(run.request): run for run in runs}
    for row, (request, _, _, samples, _) in enumerate(scheduled):
        if not samples:
            continue
        request.output_token_ids.append(int(result.token_ids[row]))
        if request.params.logprobs is not None:
            assert result.logprobs is not None
            by_request[id(request)].logprobs.append(result.logprobs.top[row])


def generate(runner: ModelRunner, runs: list[Run], depth: int, *, recompute: bool) -> int:
    """Run to the end with `depth` steps in flight; return how many inputs were.

    With `recompute`, a request loses its cache on the way: its chunk then ends with a token that
    only the device knows (no more than one of them can be unknown).
    """
    pending: deque[tuple[list[ScheduledRequest], DeviceStep]] = deque()
    num_in_flight = 0
    for number, run in enumerate(runs):
        give_blocks(run.request, 1 + number * BLOCKS_PER_REQUEST)
    for step in itertools.count():
        if recompute and step == 8:
            request = runs[1].request
            give_blocks(request, 1 + len(runs) * BLOCKS_PER_REQUEST)
            request.num_computed_tokens = 0
        active = [r for r in runs if step >= r.entry and r.num_promised < NUM_NEW_TOKENS]
        if not active:
            break
        scheduled = [plan(run) for run in active]
        num_in_flight += sum(s.input_in_flight for s in scheduled)
        if recompute and step == 8 and depth > 1:
            assert any(s.input_in_flight and s.num_tokens > 1 for s in scheduled)
        output = SchedulerOutput(tuple(scheduled), sum(s.num_tokens for s in scheduled))
        pending.append((scheduled, runner.execute(output)))
        if len(pending) == depth:
            scheduled, started = pending.popleft()
            retire(runs, scheduled, started.result())
    for scheduled, started in pending:
        retire(runs, scheduled, started.result())
    return num_in_flight


@pytest.mark.parametrize(("depth", "recompute"), [(2, True), (3, False)])
def test_a_pipeline_gives_the_tokens_of_one_step_at_a_time(
    engine: Engine, depth: int, recompute: bool
) -> None:
    assert isinstance(engine.runner, ModelRunner)
    expected, got = make_runs(engine), make_runs(engine)
    assert generate(engine.runner, expected, depth=1, recompute=recompute) == 0
    num_in_flight = generate(engine.runner, got, depth, recompute=recompute)
    assert num_in_flight > len(CASES) * (NUM_NEW_TOKENS - 4)
    for a, b in zip(expected, got, strict=True):
        assert b.request.output_token_ids == a.request.output_token_ids
        np.testing.assert_array_equal(b.logprobs, a.logprobs)
    # The test would be blind if tokens did not depend on their history.
    assert all(len(set(run.request.output_token_ids)) > 5 for run in got)


def test_one_step_at_a_time_gives_the_tokens_of_the_engine(engine: Engine) -> None:
    assert isinstance(engine.runner, ModelRunner)
    runs = make_runs(engine)
    generate(engine.runner, runs, depth=2, recompute=True)
    for (prompt, fields), run in zip(CASES, runs, strict=True):
        params = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **fields)
        engine.add_request("alone", list(prompt), params)
        token_ids: list[int] = []
        while engine.has_unfinished:
            for output in engine.step()[0]:
                token_ids += output.outputs[0].token_ids
        assert run.request.output_token_ids[: len(token_ids)] == token_ids
        assert len(token_ids) >= (params.min_tokens or NUM_NEW_TOKENS)
