"""Server-sent events: one `data:` line per chunk, `[DONE]` at the end, errors as events."""

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from paged.server.errors import to_api_error

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies of the nginx family would otherwise collect the whole stream before passing it on.
    "X-Accel-Buffering": "no",
}
_DONE = b"data: [DONE]\n\n"

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
    not read stays with the engine.

    Args:
      request: of the client.
      chunks: groups of chunks.
      end: written behind the last one.
    """
    async with aclosing(chunks):
        first = await anext(chunks, ())
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        try:
            await response.write(_encode(first))
            async for group in chunks:
                await response.write(_encode(group))
        except ConnectionError:
            raise  # the client is gone: nobody to tell
        except Exception as error:
            await response.write(_encode([to_api_error(error).body()]))
        await response.write(end)
        await response.write_eof()
        return response


def _encode(group: Sequence[Chunk | bytes]) -> bytes:
    return b"".join(
        [
            chunk if isinstance(chunk, bytes) else b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            for chunk in group
        ]
    )
