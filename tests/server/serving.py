"""Runs a test against an application over real HTTP, in an event loop of its own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from paged.server.app import make_app
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine

type Client = TestClient[web.Request, web.Application]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def with_server[T](
    test: Callable[[Client], Awaitable[T]],
    engine: FakeEngine | None = None,
    *,
    app: web.Application | None = None,
    **settings: Any,
) -> T:
    """Serve an engine, or an application, run `test` with a client and return its result."""

    async def run() -> T:
        served = app or make_app(engine or FakeEngine(), ServerSettings(**settings))
        async with TestClient(TestServer(served)) as client:
            return await test(client)

    return asyncio.run(run())


def post(
    path: str, body: Any, engine: FakeEngine | None = None, *, headers: Any = None, **settings: Any
) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of one POST."""

    async def test(client: Client) -> tuple[int, dict[str, Any]]:
        async with client.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    return with_server(test, engine, **settings)


def ok(path: str, body: Any, engine: FakeEngine | None = None, **options: Any) -> dict[str, Any]:
    """Return the JSON of one POST that must succeed."""
    status, answer = post(path, body, engine, **options)
    assert status == 200, answer
    return answer


def error_of(
    path: str, body: Any, engine: FakeEngine | None = None, status: int = 400, **options: Any
) -> dict[str, Any]:
    """Return the error object of one POST that must fail, its shape checked."""
    got, answer = post(path, body, engine, **options)
    assert got == status, answer
    return checked_error(answer, status)


def checked_error(answer: dict[str, Any], status: int) -> dict[str, Any]:
    """Return the error object of an answer after checking its shape."""
    assert list(answer) == ["error"]
    error: dict[str, Any] = answer["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == status
    assert error["message"]
    assert error["type"]
    return error


def stream(path: str, body: Any, engine: FakeEngine | None = None) -> list[Any]:
    """Return the events of one streamed POST; the framing is checked, [DONE] left out."""

    async def test(client: Client) -> bytes:
        async with client.post(path, json={**body, "stream": True}) as response:
            raw = await response.read()
            assert response.status == 200, raw
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return raw

    return events_of(with_server(test, engine))


def events_of(raw: bytes) -> list[Any]:
    """Return the events of a stream's bytes."""
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    for block in blocks[:-1]:
        assert block.startswith("data: ")
        assert "\n" not in block
    return [json.loads(block[len("data: ") :]) for block in blocks[:-2]]


def text_of(events: list[Any], index: int = 0) -> str:
    """Return the joined text of one choice of a stream."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def http_request(path: str, body: Any, headers: bytes = b"") -> bytes:
    """Return the bytes of a POST, to be sent over a `connection`; the server closes it."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return head.encode() + headers + b"\r\n" + data


@contextlib.asynccontextmanager
async def connection(
    client: Client, request: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send bytes over a connection of its own; closed at the end, if not before."""
    assert client.port is not None
    reader, writer = await asyncio.open_connection(client.host, client.port)
    try:
        writer.write(request)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something holds, at most five minutes: a busy machine is no failure."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.002)
