"""Cross-origin requests: which web pages may read the answers; none unless they are listed."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from paged.server.errors import ApiError
from paged.server.reply_headers import REPLY_HEADERS
from paged.server.settings import CorsSettings

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_MAX_AGE_SECONDS = "600"


def cors_middleware(settings: CorsSettings) -> Middleware:
    """Return the middleware that answers preflights and lets listed origins read responses.

    It must come before the one that asks for a key, which a browser's preflight does not have.
    Without origins it does nothing: a browser then refuses.

    Source: https://fetch.spec.whatwg.org/#http-cors-protocol
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is None or not settings.origins:
            return await handler(request)
        is_allowed = "*" in settings.origins or origin in settings.origins
        headers = request[REPLY_HEADERS]
        # Caches must not hand one origin's answer to another.
        headers["Vary"] = "Origin"
        if is_allowed:
            any_origin = "*" in settings.origins and not settings.allow_credentials
            headers["Access-Control-Allow-Origin"] = "*" if any_origin else origin
            if settings.allow_credentials:
                headers["Access-Control-Allow-Credentials"] = "true"
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return _preflight(request, settings, is_allowed=is_allowed)
        return await handler(request)

    return middleware


def _preflight(
    request: web.Request, settings: CorsSettings, *, is_allowed: bool
) -> web.StreamResponse:
    """Answer what a browser asks before it sends the request itself."""
    method = request.headers["Access-Control-Request-Method"]
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    names = [name.strip().lower() for name in wanted.split(",") if name.strip()]
    known = {name.lower() for name in settings.headers}
    if not is_allowed:
        raise ApiError("This origin is not listed in --allowed-origins.")
    if "*" not in settings.methods and method not in settings.methods:
        raise ApiError(f"Method {method[:20]} is not listed in --allowed-methods.")
    if "*" not in known and (unknown := [name for name in names if name not in known]):
        raise ApiError(f"Header {unknown[0][:80]} is not listed in --allowed-headers.")
    methods = _METHODS if "*" in settings.methods else settings.methods
    reply = {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Max-Age": _MAX_AGE_SECONDS,
    }
    if names:
        # By name: "*" does not cover Authorization.
        reply["Access-Control-Allow-Headers"] = ", ".join(names)
    return web.Response(status=200, headers=reply)
