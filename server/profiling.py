"""`/start_profile` and `/stop_profile`: a trace of the running server, for `--profile-dir`."""

import re

from aiohttp import web

from paged.server.context import CONTEXT
from paged.server.errors import ApiError


async def start_profile(request: web.Request) -> web.Response:
    """Start a trace; with `?num_steps=N` it ends after so many steps of the engine."""
    text = request.query.get("num_steps")
    if text is not None and not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ApiError(
            f"num_steps must be a whole number from 1 to 999999, got {text[:80]!r}.",
            param="num_steps",
        )
    context = request.app[CONTEXT]
    directory = context.settings.observability.profile_dir
    assert directory is not None
    try:
        await context.engine.start_profile(directory, None if text is None else int(text))
    except RuntimeError as error:
        raise ApiError(str(error), status=409) from error
    return web.Response()


async def stop_profile(request: web.Request) -> web.Response:
    """Stop the trace; answered when it has been written."""
    try:
        await request.app[CONTEXT].engine.stop_profile()
    except RuntimeError as error:
        raise ApiError(str(error), status=409) from error
    return web.Response()
