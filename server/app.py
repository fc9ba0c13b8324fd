"""The HTTP application: routes, middlewares and what runs beside them."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from paged.server.auth import auth_middleware
from paged.server.context import CONTEXT, make_context
from paged.server.cors import cors_middleware
from paged.server.engine_state import ENGINE_WATCH, EngineWatch
from paged.server.errors import error_middleware
from paged.server.http_metrics import note_route
from paged.server.instruments import install_instruments
from paged.server.log_stats import LogStats
from paged.server.openapi import DOCUMENT, openapi_document
from paged.server.protocol import BODY_TIMEOUT
from paged.server.rate_limit import rate_limit_middleware
from paged.server.reply_headers import add_reply_headers, reply_headers_middleware
from paged.server.routes import make_routes
from paged.server.settings import ServerSettings

if TYPE_CHECKING:
    from paged.scheduler.async_engine import AsyncEngine

_IS_STRIPPED = web.RequestKey("is_stripped", bool)

access_logger = logging.getLogger("paged.server.access")


def make_app(engine: "AsyncEngine", settings: ServerSettings | None = None) -> web.Application:
    """Return the application that serves an engine; serve it with `make_runner`.

    The engine is the caller's: it must be started before the first request and shut down after
    the application.

    Raises: ValueError if the settings contradict the model, or need what is not installed; its
      start, for an adapter that cannot be loaded.
    """
    settings = settings or ServerSettings()
    routes = make_routes(settings)
    open_paths = frozenset(route.path for route in routes if not route.needs_key)
    app = web.Application(
        middlewares=[
            reply_headers_middleware(request_ids=settings.request_id_headers),
            error_middleware(),
            cors_middleware(settings.cors),
            root_path_middleware(settings.root_path),
            auth_middleware(settings.api_keys, open_paths),
            rate_limit_middleware(settings.max_requests_per_minute, open_paths),
            slash_middleware(),
        ],
        client_max_size=settings.client_max_size,
    )
    app[CONTEXT] = make_context(engine, settings)
    install_instruments(app)
    app[BODY_TIMEOUT] = settings.body_timeout_seconds
    if settings.ui:
        app[ENGINE_WATCH] = EngineWatch(engine)
    app.add_routes([route.definition() for route in routes])
    document = openapi_document(routes, with_keys=bool(settings.api_keys))
    app[DOCUMENT] = msgspec.json.encode(document)
    app.on_response_prepare.append(add_reply_headers)
    app.cleanup_ctx.append(observe_engine)
    app.on_startup.append(load_adapters)
    app.on_shutdown.append(end_background)
    return app


def make_runner(app: web.Application, *, shutdown_timeout: float = 5.0) -> web.AppRunner:
    """Return the runner of an application, set to cancel handlers whose client has gone.

    The cancellation is what aborts a request in the engine, streaming or not, as soon as its
    connection closes.

    Args:
      app: from `make_app`.
      shutdown_timeout: seconds that open connections get at the end.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=shutdown_timeout,
        # aiohttp writes its access log at level INFO; here it is a debugging aid.
        access_log=access_logger if access_logger.isEnabledFor(logging.DEBUG) else None,
    )


async def observe_engine(app: web.Application) -> AsyncIterator[None]:
    """Feed metrics and log lines from the engine's steps while the application runs."""
    context = app[CONTEXT]
    context.engine.add_stats_listener(context.metrics.observe)
    if not context.settings.log_stats:
        yield
        return
    log_stats = LogStats()
    context.engine.add_stats_listener(log_stats.observe)
    task = asyncio.create_task(log_stats.log_forever(context.settings.log_stats_seconds))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def load_adapters(app: web.Application) -> None:
    """Serve the adapters of the settings from the start."""
    context = app[CONTEXT]
    await context.models.load_all(context.settings.lora_modules)


async def end_background(app: web.Application) -> None:
    """End the responses that nobody waits for."""
    await app[CONTEXT].response_tasks.close()


def root_path_middleware(root_path: str) -> Middleware:
    """Return the middleware that reads `/llm/v1/models` as `/v1/models`, for a root path of /llm.

    What comes after it sees the path without the prefix, keys included; `slash_middleware` does
    the routing.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        url = request.rel_url
        if not root_path or not url.raw_path.startswith(f"{root_path}/"):
            return await handler(request)
        path = url.raw_path.removeprefix(root_path)
        stripped = request.clone(
            rel_url=URL.build(path=path, query_string=url.raw_query_string, encoded=True)
        )
        stripped._match_info = request._match_info  # replaced with the routing
        stripped[_IS_STRIPPED] = True
        return await handler(stripped)

    return middleware


def slash_middleware() -> Middleware:
    """Return the middleware that reads `/v1//models` and `/v1/models/` as `/v1/models`.

    Clients join a base URL that ends in a slash with a path that begins with one. A redirect
    would make some of them repeat a POST as a GET, so the request is handed to the right handler
    at once. Must be the innermost middleware: it replaces the routing that was already done.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.rel_url.raw_path
        single = re.sub("//+", "/", path).rstrip("/") or "/"
        if single == path and not request.get(_IS_STRIPPED):
            return await handler(request)
        url = URL.build(path=single, query_string=request.rel_url.raw_query_string, encoded=True)
        app = request.app
        request = request.clone(rel_url=url)
        match = await app.router.resolve(request)
        match.add_app(app)
        note_route(request, match)
        request._match_info = match  # as aiohttp's own normalize_path_middleware does
        return await match.handler(request)

    return middleware
