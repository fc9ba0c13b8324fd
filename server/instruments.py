"""`install_instruments`: what watches the requests of an application from outside its handlers."""

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from paged.server.context import CONTEXT
from paged.server.http_metrics import HttpMetrics
from paged.server.otlp import make_tracing
from paged.server.timing_header import start_timing, timing_middleware


def install_instruments(app: web.Application) -> None:
    """Add timing headers, traces if they are wanted, and HTTP metrics, outside all middlewares.

    Raises: ValueError if traces are wanted and OpenTelemetry is not installed.
    """
    context = app[CONTEXT]
    watch, settings = context.request_watch, context.settings.observability
    watch.add(start_timing)
    middlewares = [timing_middleware()]
    tracing = make_tracing(settings, context.model_name)
    if tracing is not None:
        from paged.server.tracing import add_trace_header

        watch.add(tracing.start_request)
        middlewares.insert(0, tracing.middleware())
        app.on_response_prepare.append(add_trace_header)
    app.middlewares[:0] = [HttpMetrics(context.metrics.registry).middleware(), *middlewares]

    async def run(_app: web.Application) -> AsyncIterator[None]:
        context.engine.add_stats_listener(watch.observe)
        if tracing is not None:
            tracing.trace_startup(context.engine.startup_phases)
        if settings.detailed_traces:
            await context.engine.measure_work()
        yield
        watch.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app.cleanup_ctx.append(run)
