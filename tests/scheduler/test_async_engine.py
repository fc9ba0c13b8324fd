"""The engine behind its thread: streams, disconnects, a full queue, a dead device."""

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import pytest

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import EngineDeadError, QueueFullError
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.params import ParameterError, SamplingParams
from tests.scheduler.fakes import make_engine, spell

HELLO = spell("hello")


def endless(request):
    """A script that takes its time, so that a test can act in the middle of a request."""
    time.sleep(0.002)
    return ord("a")


DEFAULTS = SamplingParams()
CONFIG = EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)


def load(script, *, fail_at=None, **settings) -> LoadedEngine:
    return LoadedEngine(
        engine=make_engine(script, fail_at=fail_at),
        checkpoint=SimpleNamespace(name="fake"),
        config=dataclasses.replace(CONFIG, **settings),
        max_model_len=128,
        cache_info={},
        startup_seconds={},
    )


def serve(scenario, script=HELLO, **settings):
    """Run `scenario(engine)` on a started engine, then check that nothing is left over."""

    async def main():
        engine = AsyncEngine(load(script, **settings))
        engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 30)
        finally:
            await engine.shutdown()
            assert engine._engine.scheduler.kv_cache_usage == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(main())


async def collect(engine, params=DEFAULTS, prompt=(65, 66)) -> str:
    return "".join([o.outputs[0].text async for o in engine.generate(prompt, params)])


def test_concurrent_requests_each_get_their_text():
    async def scenario(engine):
        return await asyncio.gather(*(collect(engine) for _ in range(20)))

    assert serve(scenario) == ["hello"] * 20


def test_closing_the_stream_aborts_the_request():
    async def scenario(engine):
        stream = engine.generate([65], SamplingParams(max_tokens=100))
        await anext(stream)
        assert engine.num_unfinished == 1
        await stream.aclose()
        assert engine.num_unfinished == 0
        while engine._engine.has_unfinished:
            await asyncio.sleep(0.001)

    serve(scenario, script=endless)


def test_cancelling_the_consumer_aborts_the_request():
    async def scenario(engine):
        task = asyncio.create_task(collect(engine, SamplingParams(max_tokens=100)))
        while not engine.num_unfinished:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine._engine.has_unfinished:
            await asyncio.sleep(0.001)

    serve(scenario, script=endless)


def test_abort_by_id_ends_the_stream_with_the_reason():
    async def scenario(engine):
        reasons = []
        stream = engine.generate([65], SamplingParams(max_tokens=100), request_id="mine")
        async for output in stream:
            engine.abort("mine")
            reasons.append(output.outputs[0].finish_reason)
        return reasons[-1]

    assert serve(scenario, script=endless) == "abort"


def test_bad_input_is_refused_before_it_is_queued():
    async def scenario(engine):
        with pytest.raises(ParameterError, match="prompt must hold at least one token"):
            await collect(engine, prompt=())
        assert engine.num_unfinished == 0
        return await collect(engine)

    assert serve(scenario) == "hello"


def test_a_second_request_with_the_same_id_is_refused():
    async def scenario(engine):
        stream = engine.generate([65], SamplingParams(max_tokens=100), request_id="mine")
        await anext(stream)
        with pytest.raises(ValueError, match="'mine' is not finished yet"):
            await anext(engine.generate([65], SamplingParams(), request_id="mine"))
        await stream.aclose()

    serve(scenario, script=endless)


def test_a_request_the_engine_refuses_fails_alone():
    async def scenario(engine):
        stream = engine.generate([65], SamplingParams(max_tokens=100, n=2), request_id="mine")
        await anext(stream)
        with pytest.raises(ValueError, match="'0_mine' is not finished yet"):
            await anext(engine.generate([65], SamplingParams(), request_id="0_mine"))
        await anext(stream)  # the first one goes on
        await stream.aclose()
        engine.check_health()

    serve(scenario, script=endless)


def test_a_full_queue_refuses_and_recovers():
    async def scenario(engine):
        params = SamplingParams(max_tokens=100)
        streams = [engine.generate([65], params) for _ in range(10)]
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)  # each has queued its request: 8 can run, 2 wait
        with pytest.raises(QueueFullError, match="max_num_queued_reqs=2; try again later"):
            await collect(engine)
        await asyncio.gather(*waiting)
        for stream in streams:
            await stream.aclose()
        return await collect(engine)

    assert serve(scenario, script=endless, max_num_queued_reqs=2) == "a" * 16


def test_a_failed_step_ends_every_stream_and_turns_health():
    async def scenario(engine):
        engine.check_health()
        results = await asyncio.gather(*(collect(engine) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            engine.check_health()
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await collect(engine)

    serve(scenario, script=endless, fail_at=3)


def test_draining_finishes_what_runs_and_refuses_the_rest():
    async def scenario(engine):
        running = asyncio.create_task(collect(engine))
        while not engine.num_unfinished:
            await asyncio.sleep(0)
        draining = asyncio.create_task(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="takes no new requests"):
            await collect(engine)
        await draining
        return await running

    assert serve(scenario) == "hello"


def test_draining_gives_up_after_its_timeout():
    async def scenario(engine):
        stream = engine.generate([65], SamplingParams(max_tokens=100))
        await anext(stream)
        await engine.drain(0.01)
        assert engine.num_unfinished == 1
        await stream.aclose()

    serve(scenario, script=endless)


def test_shutdown_ends_open_streams():
    async def scenario(engine):
        stream = engine.generate([65], SamplingParams(max_tokens=100))
        await anext(stream)
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            [output async for output in stream]
        with pytest.raises(EngineDeadError, match="was shut down"):
            engine.check_health()

    serve(scenario, script=endless)


def test_a_stuck_step_is_unhealthy():
    async def scenario(engine):
        engine._step_started = -1e9  # a step that began long ago
        with pytest.raises(EngineDeadError, match="in one step for more than 300 seconds"):
            engine.check_health()
        engine._step_started = None

    serve(scenario)


def test_an_engine_starts_once():
    async def scenario(engine):
        with pytest.raises(RuntimeError, match="already started"):
            engine.start()

    serve(scenario)


def test_listeners_see_every_generated_token():
    async def scenario(engine):
        seen = []
        engine.add_stats_listener(seen.append)
        await asyncio.gather(*(collect(engine) for _ in range(3)))
        assert sum(stats.num_generation_tokens for stats in seen) == 3 * len("hello") + 3
        assert sum(len(stats.finished) for stats in seen) == 3

    serve(scenario)
