"""`RequestWatch`: everybody who is interested hears of a request's end, once."""

import asyncio
from contextlib import aclosing

import pytest

from paged.scheduler.output import RequestOutput, StepStats
from paged.scheduler.params import SamplingParams
from paged.server.request_watch import RequestWatch
from tests.server.serving import eventually
from tests.server.test_metrics import finished

PARAMS = SamplingParams(n=2)


class Ends(list):
    """Collects what `end` was called with."""

    def end(self, samples, error) -> None:
        self.append(([sample.index for sample in samples], error))


async def outputs(error=None):
    for _ in range(3):
        yield RequestOutput("r", None, (), (), False)
    if error is not None:
        raise error


def step(*indices: int, request_id: str = "r") -> StepStats:
    records = tuple(finished(request_id=request_id, index=index) for index in indices)
    return StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0, finished=records)


def watching() -> tuple[RequestWatch, Ends]:
    watch, ends = RequestWatch(abort_grace_seconds=0.02), Ends()
    watch.add(lambda request_id, params, model: ends)
    return watch, ends


def test_outputs_pass_by_untouched_if_nobody_is_interested():
    watch = RequestWatch()
    stream = outputs()
    assert watch.follow("r", PARAMS, stream, model="m") is stream
    watch.add(lambda request_id, params, model: None)
    assert watch.follow("r", PARAMS, stream, model="m") is stream


def test_records_of_all_samples_are_handed_over_at_the_end():
    watch, ends = watching()

    async def run() -> None:
        number = 0
        async for _ in watch.follow("r", PARAMS, outputs(), model="m"):
            watch.observe(step(number, request_id="other"))
            if number < 2:
                watch.observe(step(number))
            assert not ends
            number += 1

    asyncio.run(run())
    assert ends == [([0, 1], None)]


def test_records_of_an_aborted_request_come_after_its_reader_has_gone():
    watch, ends = watching()

    async def run() -> None:
        async with aclosing(watch.follow("r", PARAMS, outputs(), model="m")) as stream:
            await anext(stream)
            watch.observe(step(0))
        assert not ends
        watch.observe(step(1))
        await eventually(lambda: bool(ends))

    asyncio.run(run())
    assert ends == [([0, 1], None)]


def test_records_that_never_come_are_not_waited_for_forever():
    watch, ends = watching()

    async def run() -> None:
        for number in (1, 2):
            async with aclosing(watch.follow("r", PARAMS, outputs(), model="m")) as stream:
                await anext(stream)
            if number == 2:
                watch.close()
            await eventually(lambda: len(ends) == number)  # noqa: B023

    asyncio.run(run())
    assert ends == [([], None)] * 2


def test_an_error_ends_at_once():
    watch, ends = watching()
    error = RuntimeError("broken")

    async def run() -> None:
        async for _ in watch.follow("r", PARAMS, outputs(error), model="m"):
            pass

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run())
    assert ends == [([], error)]
