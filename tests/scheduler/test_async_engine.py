"""The engine behind its thread: streams, disconnects, a full queue, a dead device."""

import asyncio
import dataclasses
import threading
from types import SimpleNamespace

import pytest

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.cache_events import AllBlocksCleared, BlockStored
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import EngineDeadError, QueueFullError
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.request import CacheMode
from tests.scheduler.fakes import make_engine, spell
from tests.scheduler.tap import Tap

HELLO = spell("hello")


def endless(request):
    return ord("a")


DEFAULTS = SamplingParams()
HUNDRED = SamplingParams(max_tokens=100)
SIXTY = SamplingParams(max_tokens=60)
CONFIG = EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)


def load(script, *, fail_at=None, **settings) -> LoadedEngine:
    return LoadedEngine(
        engine=make_engine(script, fail_at=fail_at),
        checkpoint=SimpleNamespace(name="fake"),
        config=dataclasses.replace(CONFIG, **settings),
        max_model_len=128,
        cache_info={},
    )


def serve(scenario, script=HELLO, **settings):
    """Run `scenario(engine)` on a started engine, then check that nothing is left over."""

    async def main():
        engine = AsyncEngine(load(script, **settings))
        engine.start()
        try:
            return await scenario(engine)
        finally:
            if isinstance(script, Tap):
                script.open()
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


async def num_steps_to_the_end(engine, tap) -> int:
    """Let the engine go on until it has nothing to do; return how many steps it took in all."""
    tap.open()
    while engine._engine.has_unfinished:
        await asyncio.sleep(0.001)
    return len(engine._engine.runner.steps)


def test_closing_the_stream_aborts_the_request():
    async def scenario(engine):
        stream = engine.generate([65], HUNDRED)
        await anext(stream)
        assert engine.num_unfinished == 1
        await stream.aclose()
        assert engine.num_unfinished == 0
        return await num_steps_to_the_end(engine, tap)

    tap = Tap()
    assert serve(scenario, script=tap) <= 3


def test_cancelling_the_consumer_aborts_the_request():
    async def scenario(engine):
        task = asyncio.create_task(collect(engine, HUNDRED))
        while not engine._engine.runner.steps:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_unfinished == 0
        return await num_steps_to_the_end(engine, tap)

    tap = Tap()
    assert serve(scenario, script=tap) <= 3


def test_abort_by_id_ends_the_stream_with_the_reason():
    async def scenario(engine):
        reasons = []
        async for output in engine.generate([65], HUNDRED, request_id="mine"):
            engine.abort("mine")
            tap.open()
            reasons.append(output.outputs[0].finish_reason)
        return reasons[-1]

    tap = Tap()
    assert serve(scenario, script=tap) == "abort"


def test_bad_input_is_refused_before_it_is_queued():
    async def scenario(engine):
        with pytest.raises(ParameterError, match="prompt must hold at least one token"):
            await collect(engine, prompt=())
        assert engine.num_unfinished == 0
        return await collect(engine)

    assert serve(scenario) == "hello"


def test_a_second_request_with_the_same_id_is_refused():
    async def scenario(engine):
        stream = engine.generate([65], HUNDRED, request_id="mine")
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
            await tap.open_after(anext(engine.generate([65], DEFAULTS, request_id="0_mine")))
        await anext(stream)  # the first one goes on
        await stream.aclose()
        engine.check_health()

    tap = Tap(num_tokens=2)
    serve(scenario, script=tap)


def test_a_full_queue_refuses_and_recovers():
    async def scenario(engine):
        streams = [engine.generate([65], HUNDRED) for _ in range(10)]
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
        stream = engine.generate([65], HUNDRED)
        await anext(stream)
        await engine.drain(0.01)
        assert engine.num_unfinished == 1
        await stream.aclose()

    serve(scenario, script=endless)


def test_shutdown_ends_open_streams():
    async def scenario(engine):
        stream = engine.generate([65], HUNDRED)
        await anext(stream)
        await tap.open_after(engine.shutdown())
        with pytest.raises(EngineDeadError, match="was shut down"):
            [output async for output in stream]
        with pytest.raises(EngineDeadError, match="was shut down"):
            engine.check_health()

    tap = Tap()
    serve(scenario, script=tap)


def test_a_stuck_step_is_unhealthy():
    async def scenario(engine):
        engine._thread.step_started = -1e9  # a step that began long ago
        with pytest.raises(EngineDeadError, match="in one step for more than 300 seconds"):
            engine.check_health()
        engine._thread.step_started = None

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


def test_priority_and_cache_mode_reach_the_scheduler():
    seen = []

    def script(request):
        seen.append((request.priority, request.cache_mode, request.cache_salt))
        return 2

    async def scenario(engine):
        options = {"priority": -4, "cache_mode": CacheMode.NO_STORE, "cache_salt": "s"}
        async for _ in engine.generate([65], DEFAULTS, **options):
            pass
        async for _ in engine.generate([65], DEFAULTS):
            pass
        with pytest.raises(ParameterError, match="priority must fit into 64 bits"):
            await anext(engine.generate([65], DEFAULTS, priority=2**63))

    serve(scenario, script=script)
    assert seen == [(-4, CacheMode.NO_STORE, "s"), (0, CacheMode.DEFAULT, None)]


LONG_PROMPT = tuple(range(65, 65 + 17))  # four full blocks of 4 and one token


async def cached_tokens(engine, prompt=LONG_PROMPT) -> int:
    (output,) = [o async for o in engine.generate(prompt, SamplingParams(max_tokens=1))]
    return output.num_cached_tokens


def test_a_reset_forgets_the_prefixes():
    async def scenario(engine):
        before = [await cached_tokens(engine) for _ in range(2)]
        assert await engine.reset_prefix_cache()
        return [*before, await cached_tokens(engine)]

    assert serve(scenario) == [0, 16, 0]


def test_a_reset_waits_for_nobody_and_says_so():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, HUNDRED)
        await anext(stream)
        assert not await tap.open_after(engine.reset_prefix_cache())
        assert await cached_tokens(engine) == 16
        await stream.aclose()

    tap = Tap()
    serve(scenario, script=tap)


def test_a_reset_may_preempt_what_runs_without_changing_it():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, SIXTY)
        first = await anext(stream)
        assert await tap.open_after(engine.reset_prefix_cache(reset_running_requests=True))
        text = first.outputs[0].text + "".join([o.outputs[0].text async for o in stream])
        assert text == "a" * 60
        (row,) = engine._engine.runner.steps[-1].scheduled
        return row.request.num_preemptions

    tap = Tap()
    assert serve(scenario, script=tap) == 1


def test_a_new_weights_epoch_keeps_the_output_and_forgets_the_prefixes():
    async def scenario(engine):
        stream = engine.generate(LONG_PROMPT, SIXTY)
        first = await anext(stream)
        await tap.open_after(engine.advance_weights_epoch())
        text = first.outputs[0].text + "".join([o.outputs[0].text async for o in stream])
        assert text == "a" * 60
        assert await cached_tokens(engine) == 16, "computed with the new weights"
        await engine.advance_weights_epoch()
        return await cached_tokens(engine)

    tap = Tap()
    assert serve(scenario, script=tap) == 0


@pytest.mark.parametrize("name", ["reset_prefix_cache", "advance_weights_epoch"])
def test_a_dead_engine_resets_nothing(name):
    async def scenario(engine):
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await collect(engine)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await getattr(engine, name)()

    serve(scenario, fail_at=0)


def test_whoever_waits_for_a_reset_learns_of_the_engines_end():
    in_step, go_on = threading.Event(), threading.Event()

    def burn(_request):
        in_step.set()
        assert go_on.wait(300)
        raise RuntimeError("the device is on fire")

    async def scenario(engine):
        stream = engine.generate([65], HUNDRED)
        reading = asyncio.create_task(anext(stream))
        await asyncio.to_thread(in_step.wait)  # so the reset has to wait
        resets = [asyncio.create_task(engine.reset_prefix_cache()) for _ in range(3)]
        await asyncio.sleep(0)
        resets[0].cancel()
        go_on.set()
        results = await asyncio.gather(*resets, reading, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [type(result) for result in results[1:]] == [EngineDeadError] * 3
        await stream.aclose()

    serve(scenario, script=burn)


def test_shutdown_answers_whoever_waits_for_a_reset():
    async def scenario(engine):
        stream = engine.generate([65], HUNDRED)
        await anext(stream)
        reset = asyncio.create_task(engine.reset_prefix_cache())
        await tap.open_after(engine.shutdown())
        result = await asyncio.gather(reset, return_exceptions=True)
        assert result in ([False], [True]) or isinstance(result[0], EngineDeadError)
        await stream.aclose()

    tap = Tap()
    serve(scenario, script=tap)


def test_subscribers_hear_on_the_event_loop_what_is_stored_and_cleared():
    async def scenario(engine):
        events = []
        threads = set()
        unsubscribe = engine.subscribe_cache_events(events.append)
        engine.subscribe_cache_events(lambda _: threads.add(threading.get_ident()))
        await cached_tokens(engine)
        (stored,) = events
        assert isinstance(stored, BlockStored)
        assert (stored.token_ids, len(stored.block_hashes)) == (LONG_PROMPT[:16], 4)
        assert await engine.reset_prefix_cache()
        assert events == [stored, AllBlocksCleared()]
        unsubscribe()
        unsubscribe()  # once more does no harm
        await cached_tokens(engine)
        assert len(events) == 2
        assert threads == {threading.get_ident()}

    serve(scenario)


def test_nobody_listens_once_the_last_subscriber_has_left():
    async def scenario(engine):
        source = engine._engine.scheduler.pool.events
        calls = []
        leave = [engine.subscribe_cache_events(calls.append) for _ in range(2)]
        await cached_tokens(engine)
        assert source.is_active
        assert len(calls) == 2
        for unsubscribe in leave:
            unsubscribe()
        again = engine.subscribe_cache_events(calls.append)
        await engine.reset_prefix_cache()
        assert calls[2:] == [AllBlocksCleared()]
        again()
        await engine.reset_prefix_cache()
        assert not source.is_active

    serve(scenario)


def test_a_subscriber_that_fails_fails_alone(caplog):
    async def scenario(engine):
        events = []
        engine.subscribe_cache_events(lambda event: 1 / 0)
        engine.subscribe_cache_events(events.append)
        await cached_tokens(engine)
        assert len(events) == 1
        engine.check_health()

    serve(scenario)
    assert "A subscriber of cache events has failed." in caplog.text


def test_a_busy_consumer_gets_several_steps_as_one_output():
    async def scenario(engine):
        outputs = []
        params = SamplingParams(max_tokens=40, n=2, ignore_eos=True)
        async for output in engine.generate([65, 66], params):
            outputs.append(output)
            await num_steps_to_the_end(engine, tap)
            await engine.snapshot()  # all that has been handed over is there
        return outputs

    tap = Tap(num_tokens=2)
    outputs = serve(scenario, script=tap)
    assert len(outputs) <= 3
    for index in range(2):
        deltas = [sample for o in outputs for sample in o.outputs if sample.index == index]
        assert "".join(delta.text for delta in deltas) == "a" * 40
        assert [i for delta in deltas for i in delta.token_ids] == [ord("a")] * 40
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_who_does_not_stream_gets_one_output():
    async def scenario(engine):
        whole = engine.generate([65], DEFAULTS, stream=False)
        outputs = [output async for output in whole]
        return [(o.outputs[0].text, o.outputs[0].finish_reason, o.finished) for o in outputs]

    assert serve(scenario) == [("hello", "stop", True)]
