"""An engine that plans ahead says the same as one that does not, one call of `step` later."""

from collections.abc import Callable

import pytest

from paged.scheduler.engine import Engine
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from tests.scheduler.fakes import make_engine, spell

TEXT = "a stitch in time saves nine"


def collect(engine: Engine) -> dict[str, tuple[str, tuple[int, ...], str | None, object]]:
    """Run to the end; return text, ids, finish and stop reason by sample."""
    texts: dict[str, str] = {}
    ids: dict[str, tuple[int, ...]] = {}
    ends: dict[str, tuple[str | None, object]] = {}
    while engine.has_unfinished:
        for output in engine.step()[0]:
            for sample in output.outputs:
                name = f"{output.request_id}/{sample.index}"
                texts[name] = texts.get(name, "") + sample.text
                ids[name] = ids.get(name, ()) + tuple(sample.token_ids)
                ends[name] = sample.finish_reason, sample.stop_reason
    return {name: (texts[name], ids[name], *ends[name]) for name in texts}


def greedy(**settings) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 40} | settings)


PARAMS = {
    "end of sequence": greedy(),
    "length": greedy(max_tokens=7),
    "one token": greedy(max_tokens=1),
    "stop string": greedy(stop=["time"]),
    "stop token": greedy(stop_token_ids=[ord("m")]),
    "past the end": greedy(ignore_eos=True),
    "samples": SamplingParams(n=3, seed=1, max_tokens=9),
    "logprobs": greedy(logprobs=2, max_tokens=5),
    "bad words": greedy(bad_words=["zq", "qz"], max_tokens=12),
    "least length": greedy(min_tokens=3),
}


def add_all(engine: Engine, script_length: int = 10) -> None:
    for number, (name, params) in enumerate(PARAMS.items()):
        engine.add_request(name, [10 + number] * (script_length + 7 * number), params)


@pytest.mark.parametrize("num_blocks", [400, 45])
def test_outputs_are_equal(num_blocks):
    engines = [
        make_engine(spell(TEXT), num_blocks=num_blocks, async_scheduling=is_async)
        for is_async in (False, True)
    ]
    for engine in engines:
        add_all(engine)
    expected, got = (collect(engine) for engine in engines)
    assert got == expected
    assert len(got) == len(PARAMS) + 2
    for engine in engines:
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_a_step_is_dispatched_before_the_one_before_it_is_read():
    events = []

    def script(request: Request) -> int:
        events.append("read")
        return ord("x")

    engine = make_engine(script, async_scheduling=True)
    runner = engine.runner
    execute: Callable = runner.execute

    def recording(output):
        events.append("dispatch")
        return execute(output)

    runner.execute = recording
    engine.add_request("r", [5, 6, 7], greedy(max_tokens=3))
    while engine.has_unfinished:
        engine.step()
    assert events == ["dispatch", "dispatch", "read", "dispatch", "read", "read"]


def test_a_stop_costs_one_row_that_nobody_sees():
    engine = make_engine(spell("ab"), async_scheduling=True)
    engine.add_request("r", [5], greedy())
    assert collect(engine)["r/0"][:2] == ("ab", (ord("a"), ord("b"), 2))
    rows = [step for step in engine.runner.steps if step.scheduled]
    assert len(rows) == 4  # prompt, two letters, and the one behind the end


def test_request_whose_bans_depend_on_its_last_token_waits_for_it():
    engine = make_engine(spell(TEXT), async_scheduling=True)
    engine.add_request("bad words", [5], greedy(bad_words=["zq"], max_tokens=4))
    engine.add_request("other", [6], greedy(max_tokens=4))
    collect(engine)
    by_step = [[s.request.request_id for s in step.scheduled] for step in engine.runner.steps]
    assert by_step[0] == ["bad words", "other"]
    assert by_step[1] == ["other"]
    assert sum("bad words" in names for names in by_step) == 4
    in_flight = [s.input_in_flight for step in engine.runner.steps for s in step.scheduled]
    assert sum(in_flight) == 3  # "other" alone


def test_abort_with_a_sample_in_flight_ends_the_request_at_once():
    engine = make_engine(spell(TEXT), async_scheduling=True)
    engine.add_request("r", [5], greedy())
    for _ in range(3):
        engine.step()
    (output,) = engine.abort(["r"])
    assert output.outputs[0].finish_reason == "abort"
    assert engine.has_unfinished  # the step in flight
    assert engine.step()[0] == []
    assert not engine.has_unfinished


def test_reset_waits_for_the_step_in_flight_and_loses_none_of_its_outputs():
    engine = make_engine(spell(TEXT), async_scheduling=True)
    engine.add_request("r", [5] * 9, greedy())
    for _ in range(4):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    engine.advance_weights_epoch()
    text = "".join(s.text for output in engine.step()[0] for s in output.outputs)
    rest = collect(engine)["r/0"][0]
    assert (TEXT[:2] + text + rest)[: len(TEXT)].endswith(rest)
    assert TEXT.endswith(text + rest)


def test_close_with_a_step_in_flight():
    engine = make_engine(spell(TEXT), async_scheduling=True)
    engine.add_request("r", [5], greedy())
    engine.step()
    engine.close()
    assert engine.runner.closed
    assert not engine.has_unfinished
