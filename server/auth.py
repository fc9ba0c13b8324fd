"""API keys: a route is closed unless its row says otherwise (`Route.needs_key`)."""

import hashlib
import hmac
from collections.abc import Collection, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from paged.server.errors import ApiError

TENANT = web.RequestKey("tenant", str)
"""Of a request that came with a key: a digest of that key, to tell its tenant from others."""


def auth_middleware(api_keys: Iterable[str], open_paths: Collection[str]) -> Middleware:
    """Return the middleware that asks for `Authorization: Bearer <key>`.

    Args:
      api_keys: that open everything.
      open_paths: open to all, such as a page that asks for the key.

    Unknown paths are closed too, so a stranger cannot even learn which routes exist. Without keys
    everything is open.
    """
    digests = [_digest(key.encode()) for key in api_keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # The undecoded path: what the router matches is what is compared.
        if not digests or request.rel_url.raw_path in open_paths:
            return await handler(request)
        token = _bearer_token(request)
        if not _is_known(token, digests):
            raise ApiError(
                "Missing or wrong API key; send the header 'Authorization: Bearer <key>'.",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        # Not the digest that opens the door: this one is handed on, to subscribers of cache events.
        request[TENANT] = hashlib.sha256(b"tenant\0" + token).hexdigest()
        return await handler(request)

    return middleware


def _bearer_token(request: web.Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return b""
    return token.strip().encode("utf-8", "surrogateescape")


def _is_known(token: bytes, digests: list[bytes]) -> bool:
    # All keys are compared, by digest: neither position nor length of a match shows in the time.
    digest = _digest(token)
    matches = [hmac.compare_digest(digest, known) for known in digests]
    return any(matches)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
