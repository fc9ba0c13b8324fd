"""Headers that every response gets, whichever handler or error made it, streams included."""

import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

REPLY_HEADERS = web.RequestKey("reply_headers", dict[str, str])
"""Of a request: headers that its response will get. Whoever copies the request shares them."""


def reply_headers_middleware(*, request_ids: bool) -> Middleware:
    """Return the outermost middleware, which lets the others add headers to the response.

    Args:
      request_ids: answer with the client's X-Request-Id, or a new one.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers: dict[str, str] = {}
        if request_ids:
            headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        request[REPLY_HEADERS] = headers
        return await handler(request)

    return middleware


async def add_reply_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Write the collected headers; for the application's `on_response_prepare`."""
    response.headers.update(request.get(REPLY_HEADERS, {}))
