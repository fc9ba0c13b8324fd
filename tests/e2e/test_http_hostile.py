"""Clients that mean harm, or are broken: the right 4xx for them, and nobody else notices.

One server of the tiny llama; beside every attack another client streams a completion, whose text
must be what it is when it is alone.
"""

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.loading import load_engine
from paged.server.app import make_app, make_runner
from paged.server.settings import ServerSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VICTIM = {"prompt": "victim", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
BACKLOG = 300


class Server:
    """A running server, spoken to in raw bytes."""

    def __init__(self, engine: AsyncEngine, port: int) -> None:
        self.engine = engine
        self.port = port

    @contextlib.asynccontextmanager
    async def impatient(self, body_timeout: float):
        """Yield a server of the same engine that waits only so long for a body."""
        async with running(self.engine, body_timeout_seconds=body_timeout) as port:
            yield Server(self.engine, port)

    @contextlib.asynccontextmanager
    async def connection(self):
        """Yield (reader, writer) of a new connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(self, *parts: bytes) -> tuple[int, bytes]:
        """Send bytes on a new connection and return status and rest of the first response."""
        async with self.connection() as (reader, writer):
            with contextlib.suppress(ConnectionError):  # refused before it has all arrived
                for part in parts:
                    writer.write(part)
                    await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")]
            body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
        return int(head.split()[1]), body

    async def post(self, body: Any, path: str = COMPLETIONS, **headers: str) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(request(data, path, **headers))

    async def is_idle(self) -> None:
        """Wait until the engine has nothing to do."""
        while self.engine.num_unfinished:
            await asyncio.sleep(0.01)


def request(body: bytes, path: str = COMPLETIONS, **headers: str) -> bytes:
    """Return a POST; a header of None is left out."""
    fields = {
        "Host": "x",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def running(engine: AsyncEngine, **settings: Any):
    """Serve an engine; yield the port."""
    app = make_app(engine, ServerSettings(log_stats=False, **settings))
    runner = make_runner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


type Attack = Callable[[Server], Awaitable[Any]]


@pytest.fixture(scope="module")
def attack(tiny_model, tiny_config) -> Iterator[Callable[[Attack], Any]]:
    """Run an attack beside a client that must not notice; return what the attack returns."""
    with asyncio.Runner() as loop:
        loaded = load_engine(str(tiny_model), tiny_config, progress=False)
        engine = AsyncEngine(loaded, max_backlog=BACKLOG)
        stack = contextlib.AsyncExitStack()

        async def start() -> int:
            engine.start()
            stack.push_async_callback(engine.shutdown)
            return await stack.enter_async_context(running(engine))

        async def victim(server: Server) -> list[bytes]:
            status, body = await server.post(VICTIM)
            assert status == 200, body
            return json.loads(body)["choices"][0]["text"]

        async def run(test: Attack) -> Any:
            server = Server(engine, port)
            alone = await victim(server)
            beside = asyncio.create_task(victim(server))
            result = await test(server)
            assert await beside == alone
            assert await victim(server) == alone
            await server.is_idle()
            engine.check_health()
            return result

        try:
            port = loop.run(start())
            yield lambda test: loop.run(run(test))
        finally:
            loop.run(stack.aclose())


def error_of(answer: tuple[int, bytes], *statuses: int) -> dict[str, Any]:
    status, body = answer
    assert status in (statuses or (400,)), body[:300]
    error = json.loads(body)["error"]
    assert error["code"] == status
    assert error["message"]
    return error


def body_with(field: bytes, value: bytes) -> bytes:
    return b'{"prompt": "x", "max_tokens": 1, "' + field + b'": ' + value + b"}"


def test_a_body_of_50_mib_is_too_large_whether_it_says_so_or_not(attack):
    half = b"a" * (25 << 20)
    whole = b'{"prompt": "' + half + half + b'"}'
    error_of(attack(lambda server: server.post(whole)), 413)

    async def chunked(server: Server) -> tuple[int, bytes]:
        head = request(b"", Content_Length=None, Transfer_Encoding="chunked")
        chunk = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
        return await server.send(head, *[chunk] * 50, b"0\r\n\r\n")

    error_of(attack(chunked), 413)


def test_a_small_body_that_unpacks_to_50_mib_is_too_large(attack):
    packed = gzip.compress(b'{"prompt": "' + b"a" * (50 << 20) + b'"}')
    assert len(packed) < 100_000
    error_of(attack(lambda server: server.post(packed, Content_Encoding="gzip")), 413)


def test_half_a_body_is_waited_for_only_so_long(attack):
    async def stall(server: Server) -> tuple[float, tuple[int, bytes]]:
        async with server.impatient(body_timeout=0.5) as impatient:
            started = time.monotonic()
            answer = await impatient.send(request(b'{"prompt": ', Content_Length="100"))
        return time.monotonic() - started, answer

    seconds, answer = attack(stall)
    assert "--body-timeout" in error_of(answer, 408)["message"]
    assert 0.5 <= seconds < 0.5 + 10


def test_half_a_body_and_then_nobody_leaves_nothing_behind(attack):
    async def leave(server: Server) -> None:
        for data in (request(b'{"prompt"', Content_Length="100"), b"POST /v1/comp", b"\r\n"):
            async with server.connection() as (_, writer):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0.02)

    attack(leave)


def test_clients_killed_in_mid_stream_free_what_they_held(attack):
    async def kill(server: Server) -> None:
        async def one(number: int) -> None:
            body = {**VICTIM, "prompt": f"p{number}", "max_tokens": 200, "stream": True, "n": 1}
            async with server.connection() as (reader, writer):
                writer.write(request(json.dumps(body).encode()))
                await reader.readuntil(b"data: ")

        await asyncio.gather(*map(one, range(24)))

    attack(kill)  # which waits until the engine is idle


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00",
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "x", "unknown": "\xc3\x28"}',
        b'{"prompt": "x"',
        b'{"prompt": "x"}}',
        b"[" * 100_000,
        b'{"prompt": ' * 50_000,
        body_with(b"unknown", b"[" * 50_000 + b"]" * 50_000),
        body_with(b"temperature", b"NaN"),
        body_with(b"temperature", b"Infinity"),
        body_with(b"temperature", b"-Infinity"),
        body_with(b"temperature", b"1e999"),
        body_with(b"max_tokens", b"1" + b"0" * 5000),
        body_with(b"seed", b"18446744073709551616"),
        body_with(b"priority", b"1e30"),
        body_with(b"top_k", b"-99999999999999999999"),
        body_with(b"prompt", b"[9223372036854775808]"),
        body_with(b"prompt", b"[" + b"1," * 1000 + b'"x"]'),
        body_with(b"prompt", b"[" + b'"a",' * 2000 + b'"x"]'),
        body_with(b"logit_bias", b'{"' + b"9" * 5000 + b'": 1}'),
        body_with(b"logit_bias", json.dumps({str(i): 1 for i in range(2000)}).encode()),
        body_with(b"stop", json.dumps([f"s{i}" for i in range(10_000)]).encode()),
        body_with(b"stop", json.dumps("s" * 100_000).encode()),
        body_with(b"stop_token_ids", json.dumps(list(range(10_000))).encode()),
        body_with(b"bad_words", json.dumps([f"w{i}" for i in range(10_000)]).encode()),
        body_with(b"n", b"1000000"),
        body_with(b"logprobs", b"1000000"),
        body_with(b"prompt_logprobs", b"1000000"),
        body_with(b"repetition_detection", b'{"max_pattern_size": 100000, "min_count": 2}'),
        body_with(b"stream_interval", b"0"),
        body_with(b"cache_salt", json.dumps("s" * 2000).encode()),
        body_with(b"request_id", b'"a\\u0000b"'),
        body_with(b"prompt", b'"a\\ud83d b"'),
    ],
    ids=lambda raw: raw[:60].decode("latin-1") + f"...{len(raw)}",
)
def test_bad_bodies_are_refused_by_name(attack, raw):
    async def timed(server: Server) -> tuple[float, tuple[int, bytes]]:
        started = time.monotonic()
        answer = await server.post(raw)
        return time.monotonic() - started, answer

    seconds, answer = attack(timed)
    error_of(answer)
    assert len(answer[1]) < 2000, "the error must not hand everything back"
    assert seconds < 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 10**30),
        ("top_k", 2**31),
        ("top_p", 1e-320),
        ("min_p", 1e-320),
        ("temperature", 1e-320),
        ("temperature", 0.0100001),
        ("repetition_penalty", 1e308),
        ("repetition_penalty", 1e-320),
        ("presence_penalty", 1e-320),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("priority", 2**63 - 1),
        ("truncate_prompt_tokens", 1),
        ("logit_bias", {"3": 1e308, "4": -1e308, "5": 1e-320}),
        ("stop_token_ids", list(range(60))),
        ("stop", ["\ufffd" * 4096] * 4),
    ],
)
def test_extreme_values_are_served(attack, field, value):
    # With everything that makes the sampler do its work.
    base = {"prompt": "extreme", "max_tokens": 3, "temperature": 1.0, "top_p": 0.9, "min_tokens": 2}
    base |= {"presence_penalty": 0.5, "logprobs": 2, "ignore_eos": True}
    status, body = attack(lambda server: server.post({**base, field: value}))
    assert status == 200, body


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a", "prompt": "b", "max_tokens": 1}',  # the last one counts
        body_with(b"prompt", b'"a\\u0000b"'),
        body_with(b"unknown", b"[" * 200 + b"]" * 200),
        body_with(b"user", json.dumps("\u202e" * 1000).encode()),
        b"\xef\xbb\xbf" + b" " * 1000 + body_with(b"temperature", b"0.0"),
    ],
    ids=["duplicate", "nul", "nested", "unknown field", "byte order mark"],
)
def test_odd_bodies_do_no_harm(attack, raw):
    status, body = attack(lambda server: server.post(raw))
    assert status in (200, 400), body


def test_a_regex_that_explodes_holds_nobody_up(attack):
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "(a+)+(b|a*)*{9999}$"}}
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^(a|a)*$" * 50}},
        },
    }

    async def both(server: Server) -> tuple[float, list[int]]:
        started = time.monotonic()
        answers = [await server.post(body), await server.post(chat, CHAT)]
        return time.monotonic() - started, [status for status, _ in answers]

    seconds, statuses = attack(both)
    assert set(statuses) <= {200, 400}
    assert seconds < 60


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "a", "", None])
def test_other_content_types_are_refused(attack, kind):
    raw = body_with(b"temperature", b"0")
    error_of(attack(lambda server: server.post(raw, Content_Type=kind)))


HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET " + b"/" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)) + b"\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 0x10\r\n\r\n",
        HEAD + b"X: a\x00b\r\n\r\n",
        HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=[
        "tls",
        "garbage",
        "path",
        "header",
        "headers",
        "negative",
        "two lengths",
        "smuggling",
        "hexadecimal",
        "nul",
        "bad chunk",
    ],
)
def test_what_is_no_http_is_refused(attack, data):
    status, _ = attack(lambda server: server.send(data))
    assert status in (400, 411, 413, 414, 431)


def test_an_output_that_repeats_itself_ends_and_is_counted(attack):
    body = {
        "prompt": "x",
        "max_tokens": 30,
        "allowed_token_ids": [97],
        "repetition_detection": {"max_pattern_size": 2, "min_count": 5},
    }
    head = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"

    async def test(server: Server) -> tuple[bytes, bytes]:
        _, answer = await server.post(body)
        await server.is_idle()
        return answer, (await server.send(head))[1]

    answer, metrics = attack(test)
    (choice,) = json.loads(answer)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a" * 5, "repetition")
    (line,) = [x for x in metrics.splitlines() if b'finished_reason="repetition"' in x]
    assert line.endswith(b" 1.0")


def test_request_ids_of_headers_may_be_any_text(attack):
    raw = body_with(b"temperature", b"0")
    status, body = attack(lambda server: server.post(raw, X_Request_Id="é" * 3000))
    assert status == 200
    assert json.loads(body)["id"].startswith("cmpl-")


def test_a_client_that_reads_nothing_is_given_up(attack, caplog):
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "n": 48,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 20,
    }

    async def read_nothing(server: Server) -> None:
        with socket.socket() as client:
            # Some 20 MB come; the sockets between the two hold a small part of it.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, request(json.dumps(body).encode(), CHAT))
            while "tokens behind" not in caplog.text:
                await asyncio.sleep(0.05)

    with caplog.at_level(logging.WARNING, "paged.scheduler.async_engine"):
        attack(read_nothing)
    assert "chatcmpl-" in caplog.text
