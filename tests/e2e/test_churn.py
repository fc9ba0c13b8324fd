"""Many requests, aborts and disconnects at random moments: nothing is left over.

And while they run, nothing is compiled.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from paged.models.compilation import CompilationCounter
from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.output import StepStats
from paged.scheduler.params import SamplingParams
from paged.scheduler.structured.params import StructuredOutputs

NUM_REQUESTS = 200


class Totals:
    """Sums what the engine says it did."""

    def __init__(self) -> None:
        self.generated = 0
        self.finished: dict[str, int] = {}
        self.finished_tokens = 0
        self.preempted = 0
        self.last: StepStats | None = None

    def listen(self, stats: StepStats) -> None:
        self.generated += stats.num_generation_tokens
        self.preempted += stats.num_preempted
        for request in stats.finished:
            reason = request.finish_reason
            self.finished[reason] = self.finished.get(reason, 0) + 1
            self.finished_tokens += request.num_generation_tokens
        self.last = stats


def random_params(rng: random.Random) -> SamplingParams:
    """Return parameters that reach every branch of the sampler."""
    greedy = rng.random() < 0.4
    return SamplingParams(
        temperature=0 if greedy else rng.uniform(0.2, 1.8),
        top_k=rng.choice([0, 0, 5, 100]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        n=1 if greedy else rng.choice([1, 1, 3]),
        seed=rng.choice([None, rng.getrandbits(32)]),
        logprobs=rng.choice([None, None, 3]),
        logit_bias=rng.choice([None, {65: 2.0}]),
        stop=rng.choice([None, ["e "]]),
        min_tokens=rng.choice([0, 2]),
        max_tokens=rng.randint(2, 60),
        ignore_eos=rng.random() < 0.5,
        structured_outputs=rng.choice([None, None, StructuredOutputs(regex="[a-d ]{3,40}")]),
    )


async def one_request(engine: AsyncEngine, rng: random.Random, number: int) -> int:
    """Run one request to its end, or leave it in one of three ways; return the tokens received."""
    await asyncio.sleep(rng.uniform(0, 1.5))
    prompt = [rng.randrange(3, 256) for _ in range(rng.randint(1, 150))]
    leave = rng.choice(["stay", "stay", "close", "abort", "cancel"])
    leave_after = rng.randint(0, 10)
    stream = engine.generate(prompt, random_params(rng), request_id=str(number))
    received = outputs = 0
    if leave == "cancel":
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(rng.uniform(0, 0.05))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        return 0
    async for output in stream:
        received += sum(len(sample.token_ids) for sample in output.outputs)
        outputs += 1
        if outputs > leave_after and leave == "abort":
            engine.abort(str(number))
        if outputs > leave_after and leave == "close":
            break
    await stream.aclose()
    return received


async def settled(engine: AsyncEngine) -> None:
    """Wait until the engine thread has taken the last aborts."""
    while engine.num_unfinished or engine._engine.has_unfinished:
        await asyncio.sleep(0.01)
    await engine.snapshot()  # what was handed over before it has arrived before it


def serve(tiny_model, tiny_config, scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = await AsyncEngine.create(str(tiny_model), tiny_config, progress=False)
        try:
            await scenario(engine)
        finally:
            await engine.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_200_requests_with_aborts_and_disconnects_leave_nothing_behind(tiny_model, tiny_config):
    async def scenario(engine: AsyncEngine) -> None:
        totals = Totals()
        engine.add_stats_listener(totals.listen)
        rng = random.Random(6)
        with CompilationCounter() as compilations:
            jobs = (
                one_request(engine, random.Random(rng.random()), number)
                for number in range(NUM_REQUESTS)
            )
            received = sum(await asyncio.gather(*jobs))
            await settled(engine)
        assert compilations.count == 0

        scheduler = engine._engine.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_usable
        assert scheduler.kv_cache_usage == 0
        assert scheduler.num_unfinished == scheduler.num_running == scheduler.num_waiting == 0
        assert engine._engine.num_unfinished == engine.num_unfinished == 0
        # Every token that was generated belongs to a request that has ended, and nobody got more.
        assert totals.generated == totals.finished_tokens >= received > 0
        assert set(totals.finished) == {"stop", "length", "abort"}
        assert totals.preempted > 0  # the pool of 64 blocks is far too small for all at once
        assert totals.last is not None
        assert (totals.last.num_running, totals.last.num_waiting) == (0, 0)

    serve(tiny_model, tiny_config, scenario)


def test_seeded_samples_do_not_depend_on_company_chunking_or_preemption(tiny_model, tiny_config):
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)
    prompt = list(range(30, 130))

    async def collect(engine: AsyncEngine, params: SamplingParams) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(prompt, params):
            tokens += output.outputs[0].token_ids
        return tokens

    async def scenario(engine: AsyncEngine) -> None:
        alone = await collect(engine, params)
        totals = Totals()
        engine.add_stats_listener(totals.listen)
        company = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
        crowd = [asyncio.create_task(collect(engine, company)) for _ in range(12)]
        await asyncio.sleep(0.02)
        assert await collect(engine, params) == alone
        await asyncio.gather(*crowd)
        assert totals.preempted > 0  # 13 requests of up to 20 blocks in a pool of 64

    serve(tiny_model, tiny_config, scenario)


@pytest.mark.parametrize("n", [3])
def test_samples_of_one_request_equal_single_requests_with_consecutive_seeds(
    tiny_model, tiny_config, n
):
    async def scenario(engine: AsyncEngine) -> None:
        def params(seed: int, n: int) -> SamplingParams:
            return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=12, ignore_eos=True)

        async def collect(params: SamplingParams) -> dict[int, list[int]]:
            tokens: dict[int, list[int]] = {}
            async for output in engine.generate([50, 60, 70], params):
                for sample in output.outputs:
                    tokens.setdefault(sample.index, []).extend(sample.token_ids)
            return tokens

        together = await collect(params(7, n))
        for index in range(n):
            assert (await collect(params(7 + index, 1)))[0] == together[index]

    serve(tiny_model, tiny_config, scenario)
