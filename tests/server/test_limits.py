"""What bounds clients: fields, streams, requests per minute, bodies and readers that are slow."""

import asyncio
import socket

import pytest

from paged.server.errors import ApiError
from paged.server.limits import StreamSlots
from paged.server.rate_limit import TokenBuckets
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import (
    CHAT,
    COMPLETIONS,
    Client,
    error_of,
    eventually,
    http_request,
    ok,
    with_server,
)

EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
PROMPT = {"prompt": "a", "max_tokens": 2}
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "fields", "param", "limits"),
    [
        (COMPLETIONS, {**PROMPT, "n": 3, "temperature": 1}, "n", {"max_n": 2}),
        (COMPLETIONS, {**PROMPT, "stop": ["a", "b"]}, "body.stop", {"max_stop_strings": 1}),
        (COMPLETIONS, {**PROMPT, "logprobs": 3}, "logprobs", {"max_logprobs": 2}),
        (COMPLETIONS, {**PROMPT, "prompt_logprobs": 3}, "prompt_logprobs", {"max_logprobs": 2}),
        (CHAT, {**ASK, "logprobs": True, "top_logprobs": 3}, "top_logprobs", {"max_logprobs": 2}),
        (COMPLETIONS, {**PROMPT, "prompt": ["a"] * 3}, "prompt", {"max_prompts": 2}),
        (EMBEDDINGS, {"input": ["a"] * 3}, "input", {"max_prompts": 2}),
        (RESPONSES, {"input": "a", "stop": ["a", "b"]}, "body.stop", {"max_stop_strings": 1}),
        (RESPONSES, {"input": "a", "top_logprobs": 3}, "top_logprobs", {"max_logprobs": 2}),
    ],
)
def test_flags_bound_fields(path, fields, param, limits):
    error = error_of(path, fields, **limits)
    assert error["param"] == param
    (flag,) = limits
    assert f"--{flag.replace('_', '-')}" in error["message"]
    raised = {name: value + 1 for name, value in limits.items()}
    ok(path, fields, **raised)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_n", 0),
        ("max_n", 129),
        ("max_logprobs", 21),
        ("max_stop_strings", 65),
        ("max_prompts", 0),
        ("max_concurrent_streams", 0),
        ("max_requests_per_minute", 0),
        ("stream_interval", 0),
    ],
)
def test_limits_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
        ServerSettings(**{name: value})


def test_streams_beyond_the_limit_are_429_until_one_ends():
    engine = FakeEngine(max_model_len=100_000, step_seconds=0.005)
    long = {"prompt": "a", "stream": True, "max_tokens": 10_000, "ignore_eos": True}

    async def test(client: Client) -> list[tuple[int, str | None]]:
        first = await client.post(COMPLETIONS, json=long)
        answers = []
        refused_ones = (
            (COMPLETIONS, long),
            (CHAT, {**ASK, "stream": True}),
            (RESPONSES, {"input": "a", "stream": True}),
        )
        for path, body in refused_ones:
            async with client.post(path, json=body) as refused:
                answers.append((refused.status, refused.headers.get("Retry-After")))
        async with client.post(COMPLETIONS, json=PROMPT) as whole:
            answers.append((whole.status, None))
        first.close()
        await eventually(lambda: not engine.running)
        async with client.post(CHAT, json={**ASK, "stream": True}) as after:
            answers.append((after.status, None))
        return answers

    answers = with_server(test, engine, max_concurrent_streams=1)
    assert answers == [(429, "1"), (429, "1"), (429, "1"), (200, None), (200, None)]


def test_slots_come_back_whatever_happens():
    slots = StreamSlots(1)
    for _ in range(2):
        with pytest.raises(KeyError), slots.take():
            raise KeyError
    with slots.take(), pytest.raises(ApiError, match="--max-concurrent-streams is 1"), slots.take():
        pass


def test_a_bucket_refills_evenly_and_never_beyond_its_size():
    now = 0.0
    buckets = TokenBuckets(60, lambda: now)
    assert [buckets.take("a")[0] for _ in range(60)] == list(range(59, -1, -1))
    assert buckets.take("a") == (0, 1.0)
    assert buckets.take("b") == (59, 0.0)
    now = 0.5
    assert buckets.take("a") == (0, 0.5)
    now = 1.0
    assert buckets.take("a") == (0, 0.0)
    now = 10_000.0
    assert buckets.take("a") == (59, 0.0)


def test_each_key_has_its_own_requests_per_minute():
    async def test(client: Client) -> list[tuple[int, str | None]]:
        answers = []
        for key in ("one", "one", "one", "two", "wrong", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(COMPLETIONS, json=PROMPT, headers=headers) as response:
                left = response.headers.get("x-ratelimit-remaining-requests")
                answers.append((response.status, left))
                if response.status == 429:
                    assert int(response.headers["Retry-After"]) in (29, 30)
                    assert (await response.json())["error"]["type"] == "RateLimitError"
            async with client.get("/v1/models", headers=headers) as response:
                assert response.status == (401 if key == "wrong" else 200)
        return answers

    answers = with_server(test, api_keys=("one", "two"), max_requests_per_minute=2)
    assert answers == [(200, "1"), (200, "0"), (429, "0"), (200, "1"), (401, None), (429, "0")]


def test_every_post_but_a_probe_counts_and_says_so_in_the_document():
    async def test(client: Client) -> dict:
        async with client.get("/openapi.json") as response:
            paths = (await response.json())["paths"]
        async with client.post(RESPONSES, json={"input": "a"}) as response:
            assert response.status == 200
        for path, operations in paths.items():
            if "post" in operations:
                async with client.post(path.replace("{id}", "x"), json={}) as response:
                    assert response.status == (200 if path == "/ping" else 429), path
        return paths

    paths = with_server(
        test, max_requests_per_minute=1, dev_mode=True, allow_runtime_lora_updating=True
    )
    posts = {path: operations["post"] for path, operations in paths.items() if "post" in operations}
    assert "429" not in posts.pop("/ping")["responses"]
    assert len(posts) == 10
    for operation in posts.values():
        assert "429" in operation["responses"]
        assert ("408" in operation["responses"]) == ("requestBody" in operation)


def test_a_body_that_does_not_arrive_is_408():
    async def test(client: Client) -> bytes:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(http_request(COMPLETIONS, PROMPT)[:-5])
        answer = await reader.read()
        writer.close()
        return answer

    answer = with_server(test, body_timeout_seconds=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"--body-timeout" in answer


def test_a_client_that_reads_nothing_loses_its_connection(caplog):
    engine = FakeEngine(answer="x" * 4000, max_model_len=1_000_000)
    body = {"prompt": "a", "n": 4, "stream": True, "max_tokens": 900_000, "ignore_eos": True}

    async def test(client: Client) -> None:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(reader, (client.host, client.port))
            await loop.sock_sendall(reader, http_request(COMPLETIONS, body))
            await eventually(lambda: bool(engine.aborted))
        assert not engine.running

    with_server(test, engine, write_timeout_seconds=0.2)
    assert "read nothing of its stream for 0.2 s" in caplog.text
    assert "Traceback" not in caplog.text


def test_defaults_of_templates_leave_the_requests_fields_alone():
    with pytest.raises(ValueError, match="must not hold messages, tools: requests have fields"):
        ServerSettings(default_chat_template_kwargs={"tools": [], "messages": []})
