"""Clients that come and go over HTTP, on a real engine: every block and every counter is back."""

import asyncio
import random
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from paged.models.compilation import CompilationCounter
from paged.scheduler.async_engine import AsyncEngine
from paged.server.app import make_app, make_runner
from paged.server.settings import ServerSettings

NUM_REQUESTS = 200


async def scrape(session: aiohttp.ClientSession) -> dict[str, float]:
    """Return the sum over labels of every sample on /metrics."""
    async with session.get("/metrics") as response:
        text = await response.text()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


async def one_client(session: aiohttp.ClientSession, rng: random.Random) -> int:
    """Send one request and read it to its end, or hang up on the way; return 1 if it ended."""
    await asyncio.sleep(rng.uniform(0, 3))
    stream = rng.random() < 0.7
    body: dict[str, Any] = {
        "prompt": [rng.randrange(3, 256) for _ in range(rng.randint(1, 120))],
        "max_tokens": rng.randint(1, 60),
        "temperature": 1,
        "n": rng.choice([1, 1, 2]),
        "ignore_eos": True,
        "stream": stream,
    }
    hang_up_after = rng.choice([None, None, 0, 1, 5])
    try:
        limit = None if stream or hang_up_after is None else rng.uniform(0.001, 0.2)
        async with (
            asyncio.timeout(limit),
            session.post("/v1/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            num_lines = 0
            async for _ in response.content:
                num_lines += 1
                if stream and hang_up_after is not None and num_lines > hang_up_after:
                    response.close()
                    return 0
            return 1
    except TimeoutError:
        return 0


def test_clients_that_hang_up_leave_nothing_behind(tiny_model, tiny_config):
    async def main() -> None:
        engine = await AsyncEngine.create(str(tiny_model), tiny_config, progress=False)
        runner = make_runner(make_app(engine, ServerSettings(log_stats=False)))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base_url, connector=connector) as session:
            rng = random.Random(4)
            with CompilationCounter() as compilations:
                clients = (
                    one_client(session, random.Random(rng.random())) for _ in range(NUM_REQUESTS)
                )
                num_ended = sum(await asyncio.gather(*clients))
                while engine.num_unfinished or engine._engine.has_unfinished:
                    await asyncio.sleep(0.01)
            await engine.snapshot()  # the last figures have arrived before it
            totals = await scrape(session)
        assert compilations.count == 0
        assert 0 < num_ended < NUM_REQUESTS

        pool = engine._engine.scheduler.pool
        assert pool.num_free == pool.num_usable
        assert totals["vllm:num_requests_running"] == totals["vllm:num_requests_waiting"] == 0
        assert totals["vllm:kv_cache_usage_perc"] == 0
        ended = totals["vllm:request_success_total"]
        assert ended == totals["vllm:e2e_request_latency_seconds_count"] > NUM_REQUESTS
        assert (
            totals["vllm:generation_tokens_total"] == totals["vllm:request_generation_tokens_sum"]
        )

        await runner.cleanup()
        await engine.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
