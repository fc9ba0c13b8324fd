"""A client that goes away: its request is aborted, the others go on."""

import asyncio

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import (
    CHAT,
    COMPLETIONS,
    Client,
    connection,
    eventually,
    http_request,
    with_server,
)

LONG = {"max_tokens": 100_000, "ignore_eos": True}
BODIES = [
    (COMPLETIONS, {"prompt": "a", **LONG}),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, **LONG}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], **LONG}),
]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_disconnect_aborts_within_a_step_or_so(path, body, streamed):
    engine = FakeEngine(max_model_len=200_000, step_seconds=0.01)
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1

    async def test(client: Client) -> None:
        request = http_request(path, {**body, "stream": streamed})
        async with connection(client, request) as (reader, writer):
            await eventually(lambda: len(engine.running) == num_prompts)
            if streamed:
                await reader.readuntil(b"data: ")
            writer.transport.abort()
            engine.add_stats_listener(steps.append)
            await eventually(lambda: not engine.running)

    steps = []
    with_server(test, engine)
    assert len(engine.aborted) == num_prompts
    # Of every sample one token, and some for the machine's noise.
    assert len(steps) <= num_prompts + 20 * num_prompts * body.get("n", 1)


def test_disconnect_of_one_leaves_the_others():
    engine = FakeEngine(max_model_len=200_000, step_seconds=0.005)

    async def test(client: Client) -> str:
        survivor = asyncio.create_task(
            client.post(COMPLETIONS, json={"prompt": "stays", "max_tokens": 17})
        )
        request = http_request(COMPLETIONS, {"prompt": "goes", "stream": True, **LONG})
        async with connection(client, request):
            await eventually(lambda: len(engine.running) == 2)
        response = await survivor
        return (await response.json())["choices"][0]["text"]

    assert with_server(test, engine) == "The answer is 42."
    (aborted,) = engine.aborted
    assert [s.request_id for s in engine.seen if s.prompt == "goes"] == [aborted]


def test_running_gauge_returns_to_zero():
    engine = FakeEngine(max_model_len=200_000, step_seconds=0.005)

    async def running(client: Client) -> float:
        async with client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        (line,) = [x for x in lines if x.startswith("vllm:num_requests_running{")]
        return float(line.split()[-1])

    async def test(client: Client) -> tuple[float, float]:
        request = http_request(COMPLETIONS, {"prompt": "goes", "stream": True, **LONG})
        async with connection(client, request) as (reader, _):
            await reader.readuntil(b"data: ")
            before = await running(client)
        await eventually(lambda: not engine.running)
        return before, await running(client)

    assert with_server(test, engine) == (1, 0)
