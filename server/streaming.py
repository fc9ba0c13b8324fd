"""Server-sent events: one `data:` line per chunk, `[DONE]` at the end, errors as events."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from aiohttp import web

from paged.server.context import CONTEXT
from paged.server.errors import to_api_error

logger = logging.getLogger(__name__)

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies of the nginx family would otherwise collect the whole stream before passing it on.
    "X-Accel-Buffering": "no",
}
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
# A write of fewer bytes into an empty buffer never has to wait.
_SMALL_BYTES = 16 << 10

type Chunk = dict[str, Any]
type Chunks = AsyncGenerator[Sequence[Chunk | bytes], None]
"""Groups of chunks, or of events that are spelled out; each group is written at once."""


class EventTemplate:
    """The events of chunks that differ in one text; made in a twentieth of the time.

    Args:
      chunk: returns the chunk of a text, which stands in it once.
    """

    def __init__(self, chunk: Callable[[str], Chunk]) -> None:
        # Nothing that a client could have put into an id or a name is like it.
        mark = uuid.uuid4().hex
        self._before, self._after = _encode([chunk(mark)]).split(msgspec.json.encode(mark))

    def event(self, text: str) -> bytes:
        """Return what would be written for the chunk of `text`."""
        return self._before + msgspec.json.encode(text) + self._after


async def send_events(
    request: web.Request, chunks: Chunks, *, end: bytes = _DONE
) -> web.StreamResponse:
    """Stream chunks to the client until they end; `chunks` is closed in any case.

    The first group is awaited before the headers go out, so what is wrong with a request is still
    answered with its own status. Later errors become one event of the usual error shape. Writing
    waits while the client's buffer is full: a slow reader holds up nobody else, and what it has
    not read stays with the engine, which ends a request that falls too far behind. A client that
    reads nothing for `write_timeout_seconds` loses its connection.

    Args:
      request: of the client.
      chunks: groups of chunks.
      end: written behind the last one.
    """
    context = request.app[CONTEXT]
    async with aclosing(chunks):
        with context.streams.take():
            first = await anext(chunks, ())
            response = web.StreamResponse(headers=_HEADERS)
            writer = _Writer(request, response, context.settings.write_timeout_seconds)
            groups = _with_keep_alive(chunks, context.settings.sse_keep_alive_seconds)
            # The client is gone: nobody to tell, and no fault of ours for aiohttp to log.
            with suppress(ConnectionError):
                await response.prepare(request)
                try:
                    await writer.write(_encode(first))
                    async with aclosing(groups):
                        async for group in groups:
                            await writer.write(_encode(group))
                except ConnectionError:
                    raise
                except Exception as error:
                    await writer.write(_encode([to_api_error(error).body()]))
                await writer.write(end)
                await response.write_eof()
            return response


class _Writer:
    """Writes to a client that has to read at some time."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, timeout_seconds: float
    ) -> None:
        self._request = request
        self._response = response
        self._timeout_seconds = timeout_seconds

    async def write(self, data: bytes) -> None:
        """Write; raise ConnectionError if the client is gone or reads nothing for too long."""
        transport = self._request.transport
        if transport is None or (
            len(data) < _SMALL_BYTES and transport.get_write_buffer_size() == 0
        ):
            await self._response.write(data)
            return
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._response.write(data)
        except TimeoutError:
            logger.warning(
                "A client has read nothing of its stream for %g s; its connection is closed.",
                self._timeout_seconds,
            )
            transport.abort()
            raise ConnectionResetError("The client does not read.") from None


async def _with_keep_alive(chunks: Chunks, seconds: float) -> Chunks:
    """Yield the groups of `chunks`, and a comment whenever none came for so long; 0: never."""
    if not seconds:
        async for group in chunks:
            yield group
        return
    pending: asyncio.Future[Sequence[Chunk | bytes]] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(anext(chunks))
            while not (await asyncio.wait({pending}, timeout=seconds))[0]:
                yield [_KEEP_ALIVE]
            try:
                group = pending.result()
            except StopAsyncIteration:
                return
            yield group
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


def _encode(group: Sequence[Chunk | bytes]) -> bytes:
    return b"".join(
        [
            chunk if isinstance(chunk, bytes) else b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            for chunk in group
        ]
    )
