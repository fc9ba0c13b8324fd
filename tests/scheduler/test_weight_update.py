"""What becomes of requests when an engine gets other parameters; the fake model is a script."""

import asyncio

import pytest

from paged.scheduler.params import SamplingParams
from tests.scheduler.fakes import make_engine
from tests.scheduler.tap import Tap
from tests.scheduler.test_async_engine import (
    LONG_PROMPT,
    SIXTY,
    cached_tokens,
    collect,
    endless,
    serve,
)


def other(request):
    """The script after the update."""
    return ord("b")


async def rest(stream, first) -> tuple[str, str]:
    """Return the whole text of a stream, and why it ended."""
    outputs = [first, *[output async for output in stream]]
    text = "".join(output.outputs[0].text for output in outputs)
    return text, outputs[-1].outputs[0].finish_reason


def test_requests_that_are_kept_go_on_with_the_new_parameters():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, SIXTY)
        first = await anext(stream)
        await tap.open_after(engine.update_params(other))
        text, reason = await rest(stream, first)
        assert (len(text), reason) == (60, "length")
        (row,) = engine._engine.runner.steps[-1].scheduled
        return text, row.request.num_preemptions, await cached_tokens(engine)

    tap = Tap()
    text, num_preemptions, num_cached = serve(scenario, script=tap)
    num_old = text.count("a")
    assert 0 < num_old < 60
    assert text == "a" * num_old + "b" * (60 - num_old)
    assert num_preemptions == 1
    assert num_cached == 16, "of what was computed again"


def test_cached_prefixes_are_those_of_the_old_parameters():
    async def scenario(engine):
        before = [await cached_tokens(engine) for _ in range(2)]
        await engine.update_params(endless)
        return [*before, await cached_tokens(engine)]

    assert serve(scenario) == [0, 16, 0]


def test_an_update_may_wait_and_later_requests_wait_for_it():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, SIXTY)
        first = await anext(stream)
        update = asyncio.create_task(engine.update_params(other, in_flight="wait"))
        await asyncio.sleep(0)
        later = asyncio.create_task(collect(engine, SIXTY))
        tap.let(1)  # to the end of the step, where the engine looks into its inbox
        with pytest.raises(ValueError, match=r"Another update_params.*await it first"):
            await engine.update_params(other)
        assert not update.done()
        tap.open()
        assert await rest(stream, first) == ("a" * 60, "length")
        await update
        return await later

    tap = Tap()
    assert serve(scenario, script=tap) == "b" * 60


def test_a_waiting_update_of_an_idle_engine_is_at_once():
    async def scenario(engine):
        await engine.update_params(other, in_flight="wait")
        return await collect(engine, SIXTY)

    assert serve(scenario, script=endless) == "b" * 60


def test_a_request_that_waits_for_an_update_can_be_aborted():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, SIXTY)
        first = await anext(stream)
        update = asyncio.create_task(engine.update_params(other, in_flight="wait"))
        await asyncio.sleep(0)
        held = engine.generate(LONG_PROMPT, SIXTY, request_id="held")
        waiting = asyncio.create_task(anext(held))
        await asyncio.sleep(0)
        engine.abort("held")
        tap.let(1)
        output = await waiting
        assert output.outputs[0].finish_reason == "abort"
        assert not update.done()
        tap.open()
        await held.aclose()
        await rest(stream, first)
        await update

    tap = Tap()
    serve(scenario, script=tap)


def test_an_update_may_abort_what_runs():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, SIXTY)
        first = await anext(stream)
        await tap.open_after(engine.update_params(other, in_flight="abort"))
        text, reason = await rest(stream, first)
        assert (set(text), reason) == ({"a"}, "abort")
        return await collect(engine, SIXTY)

    tap = Tap()
    assert serve(scenario, script=tap) == "b" * 60


def test_parameters_that_do_not_fit_change_nothing():
    async def scenario(engine):
        with pytest.raises(ValueError, match="params are no script"):
            await engine.update_params("weights")
        with pytest.raises(ValueError, match="in_flight='later' is unknown; choose keep, wait"):
            await engine.update_params(other, in_flight="later")
        return await collect(engine, SIXTY)

    assert serve(scenario, script=endless) == "a" * 60


def test_a_step_in_flight_is_of_the_old_parameters():
    engine = make_engine(endless, async_scheduling=True)
    engine.add_request("r", [65], SamplingParams(max_tokens=4))
    engine.step()
    engine.update_params(other)
    text = ""
    while engine.has_unfinished:
        outputs, _ = engine.step()
        text += "".join(output.outputs[0].text for output in outputs)
    assert text == "abbb"
