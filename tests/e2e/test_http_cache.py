"""The prefix cache over HTTP, on a real engine: tenants, cache modes, counters that add up."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.scheduler.eviction.policies import DEFAULT_POLICY
from paged.server.app import make_app, make_runner
from paged.server.settings import ServerSettings

KEYS = ("first-key", "second-key")
NUM_CACHED = 96  # of 100 tokens, in blocks of 8

type Serve = Callable[[Callable[["Client"], Awaitable[Any]]], Any]


class Client:
    """Requests to the server, by default as the first tenant."""

    def __init__(self, session: aiohttp.ClientSession, engine: AsyncEngine) -> None:
        self._session = session
        self._engine = engine

    def complete(self, prompt, *, key=KEYS[0], **fields):
        """Return the context manager of one completion's response."""
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        return self._session.post("/v1/completions", json=body, headers=headers)

    async def usage(self, prompt, *, stream=False, **fields) -> dict[str, Any]:
        """Return the usage of one completion, by default of two tokens."""
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.complete(prompt, **fields) as response:
            text = await response.text()
            assert response.status == 200, text
        if stream:
            text = text.split("\n\n")[-3].removeprefix("data: ")
        return json.loads(text)["usage"]

    async def cached(self, prompt, **fields) -> int:
        """Return how many tokens of a prompt were in the cache."""
        usage = await self.usage(prompt, **fields)
        return usage["prompt_tokens_details"]["cached_tokens"]

    async def reset(self, query: str = "") -> bool:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        async with self._session.post(f"/reset_prefix_cache{query}", headers=headers) as response:
            return (await response.json())["success"]

    async def cache_config(self) -> dict[str, str]:
        """Return the labels of the metric that describes the cache."""
        async with self._session.get("/metrics") as response:
            text = await response.text()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return families["vllm:cache_config_info"].samples[0].labels

    async def counters(self) -> dict[str, float]:
        """Return the sum over labels of every sample on /metrics, and each medium's own."""
        await self._engine.snapshot()  # the last figures have arrived before it
        async with self._session.get("/metrics") as response:
            text = await response.text()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
                if "medium" in sample.labels:
                    totals[sample.labels["medium"]] = sample.value
        return totals


@pytest.fixture(scope="module")
def serve(tiny_model, tiny_config) -> Iterator[Serve]:
    """Run a test against a server with two tenants, which lives as long as the module."""
    with serving(tiny_model, tiny_config) as run:
        yield run


@contextlib.contextmanager
def serving(model: Path, config: EngineConfig) -> Iterator[Serve]:
    """Yield a function that runs a test against a server with two tenants."""
    settings = ServerSettings(api_keys=KEYS, dev_mode=True, log_stats=False)
    with asyncio.Runner() as loop:
        engine = loop.run(AsyncEngine.create(str(model), config, progress=False))
        runner = make_runner(make_app(engine, settings))

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()

        async def run(test: Callable[[Client], Awaitable[Any]]) -> Any:
            base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession(base_url) as session:
                client = Client(session, engine)
                assert await client.reset()
                return await test(client)

        async def stop() -> None:
            await runner.cleanup()
            await engine.shutdown()

        try:
            loop.run(start())
            yield lambda test: loop.run(run(test))
        finally:
            loop.run(stop())


def prompt(seed: int, length: int = 100) -> list[int]:
    return [3 + (seed * 37 + i * (seed + 1)) % 250 for i in range(length)]


def test_tenants_find_their_own_prefixes_and_nobody_elses(serve):
    async def test(client: Client) -> list[int]:
        first, second = ({"key": key} for key in KEYS)
        uses = [first, second, first, second, {"cache_salt": "s"}, {"cache_salt": "s"}, first]
        return [await client.cached(prompt(1), **use) for use in uses]

    assert serve(test) == [0, 0, NUM_CACHED, NUM_CACHED, 0, NUM_CACHED, NUM_CACHED]


def test_a_prompt_that_is_not_stored_is_not_found_but_finds(serve):
    async def test(client: Client) -> list[int]:
        modes = ["no_store", "no_store", "default", "no_store"]
        return [await client.cached(prompt(2), cache=mode) for mode in modes]

    assert serve(test) == [0, 0, 0, NUM_CACHED]


@pytest.mark.parametrize(("mode", "num_cached"), [("default", 0), ("pin", NUM_CACHED)])
def test_a_pinned_prompt_outlives_what_comes_after_it(serve, mode, num_cached):
    async def test(client: Client) -> int:
        await client.usage(prompt(3), cache=mode)
        for seed in range(10, 16):  # 6 x 25 blocks, where 64 are all there are
            await client.usage(prompt(seed, 200))
        return await client.cached(prompt(3))

    assert serve(test) == num_cached


def test_a_reset_forgets_and_may_preempt(serve):
    async def test(client: Client) -> None:
        assert await client.cached(prompt(4)) == 0
        assert await client.reset()
        assert await client.cached(prompt(4)) == 0
        for _ in range(10):  # on a busy machine a request may end before it is preempted
            if await discarded_by_a_reset(client) >= 100:
                return
        pytest.fail("no request was preempted")

    async def discarded_by_a_reset(client: Client) -> float:
        before = await client.counters()
        streamed = {"max_tokens": 150, "stream": True, "return_token_ids": True}
        async with client.complete(prompt(5), **streamed) as response:
            first = await response.content.readline()  # of one token or a few: it runs
            is_over = await client.reset()
            assert await client.reset("?reset_running_requests=true")
            events = (first.decode() + await response.text()).split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 150
        name = "paged:preemption_discarded_tokens_total"
        discarded = (await client.counters())[name] - before[name]
        assert not (is_over and discarded), "a reset that was done preempted nobody"
        return discarded

    serve(test)


def test_settings_of_the_cache_are_labels(serve):
    info = serve(Client.cache_config)
    assert {
        "block_size": "8",
        "num_gpu_blocks": "65",
        "enable_prefix_caching": "True",
        "prefix_cache_policy": DEFAULT_POLICY,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_offloading_size": "0.0",
        "kv_offloading_disk_size": "None",
        "disable_hybrid_kv_cache_manager": "False",
    }.items() <= info.items()
    assert not [name for name in info if "path" in name], "the page may be open to strangers"


def test_counters_agree_with_what_clients_were_told(serve):
    async def test(client: Client) -> None:
        before = await client.counters()
        usages = [
            await client.usage(prompt(seed, length), stream=stream, key=key, cache=mode)
            for seed, length, stream, key, mode in [
                (7, 100, False, KEYS[0], "default"),
                (7, 100, True, KEYS[0], "default"),
                (7, 60, True, KEYS[0], "no_store"),
                (7, 100, False, KEYS[1], "pin"),
                (8, 33, False, KEYS[1], "no_store"),
                (8, 33, False, KEYS[1], "default"),
                (7, 105, False, KEYS[1], "default"),
            ]
        ]
        after = await client.counters()
        grown = {name: after[name] - before[name] for name in after}
        told = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        num_prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
        assert told == [0, 96, 56, 0, 0, 0, 96]
        assert grown["vllm:prefix_cache_hits_total"] == sum(told)
        assert grown["vllm:prompt_tokens_cached_total"] == sum(told)
        assert grown["vllm:prefix_cache_queries_total"] == num_prompt_tokens
        assert grown["vllm:prompt_tokens_total"] == num_prompt_tokens
        assert grown["vllm:external_prefix_cache_queries_total"] == 0
        assert grown["vllm:external_prefix_cache_hits_total"] == 0
        assert grown["vllm:request_max_num_generation_tokens_count"] == len(usages)
        assert (
            grown["vllm:request_max_num_generation_tokens_sum"]
            == grown["vllm:generation_tokens_total"]
            == sum(usage["completion_tokens"] for usage in usages)
        )

    serve(test)


@pytest.mark.parametrize(("num_host_blocks", "medium"), [(200, "host"), (4, "disk")])
def test_what_comes_back_from_below_is_counted_by_medium(
    tiny_model, tiny_config, tmp_path, num_host_blocks, medium
):
    config = dataclasses.replace(
        tiny_config,
        kv_offloading_size=num_host_blocks * 9 * 2**10 / 2**30,  # the tiny model's have 8 KiB
        kv_offloading_path=str(tmp_path / "kv"),
    )

    async def test(client: Client) -> None:
        for seed in range(20, 26):  # 6 x 25 blocks, where the device has 64
            await client.usage(prompt(seed, 200))
        before = await client.counters()
        usages = [await client.usage(prompt(seed, 200)) for seed in range(20, 26)]
        after = await client.counters()
        grown = {name: after[name] - before[name] for name in after}
        told = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        on_device = grown["vllm:prefix_cache_hits_total"]
        below = grown["vllm:external_prefix_cache_hits_total"]
        assert on_device + below == told == grown["vllm:prompt_tokens_cached_total"]
        assert below == grown["host"] + grown["disk"]
        assert grown[medium] > 0
        num_prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
        assert grown["vllm:prefix_cache_queries_total"] == num_prompt_tokens
        external_queries = grown["vllm:external_prefix_cache_queries_total"]
        assert external_queries == num_prompt_tokens - on_device
        assert await client.reset()
        assert [await client.cached(prompt(seed, 200)) for seed in range(20, 26)] == [0] * 6

    with serving(tiny_model, config) as run:
        run(test)
