"""The playground: a page for people at `/`, in plain JavaScript, and its files below `/ui/`.

It loads nothing from elsewhere, as its content security policy says, so that it works without a
network. Its files are open to all even where keys are asked for: they hold no secret, and the page
asks its user for the key.
"""

import hashlib
import importlib.resources
from functools import cache

from aiohttp import web

PAGE_PATHS = {
    "/": "text/html",
    "/ui/style.css": "text/css",
    "/ui/icon.svg": "image/svg+xml",
    "/ui/app.js": "text/javascript",
    "/ui/api.js": "text/javascript",
    "/ui/chat.js": "text/javascript",
    "/ui/controls.js": "text/javascript",
    "/ui/live.js": "text/javascript",
    "/ui/markdown.js": "text/javascript",
    "/ui/timing.js": "text/javascript",
}
"""Path of each file -> its media type."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for again each time, as a new version of this program may be behind the address.
    "Cache-Control": "no-cache",
}


async def show_file(request: web.Request) -> web.Response:
    """Return the file that the path names, or 304 if the client has it."""
    path = request.path
    body, etag = _read(path)
    known = request.if_none_match or ()
    is_known = any(tag.value in (etag, "*") for tag in known)
    response = web.Response(status=304) if is_known else web.Response(body=body)
    if not is_known:
        response.content_type = PAGE_PATHS[path]
        response.charset = "utf-8"
    response.etag = etag
    response.headers.update(_HEADERS)
    return response


@cache
def _read(path: str) -> tuple[bytes, str]:
    """Return a file and its entity tag."""
    name = path.removeprefix("/ui/") if path != "/" else "index.html"
    body = (importlib.resources.files("paged.server") / "ui" / name).read_bytes()
    return body, hashlib.sha256(body).hexdigest()[:32]
