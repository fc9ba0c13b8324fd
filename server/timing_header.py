"""`Server-Timing`: where the time of an answer went, for clients that ask for it."""

from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from paged.scheduler.output import FinishedRequestStats
from paged.scheduler.params import SamplingParams

REQUEST_HEADER = "X-Request-Timing"
"""A request with this header set to 1 gets the times of its answer."""

_TIMINGS: ContextVar["Timings | None"] = ContextVar("timings", default=None)


class Timings:
    """The times of one HTTP request, those of its sample that ended last; a `Watcher`."""

    def __init__(self) -> None:
        self._last: FinishedRequestStats | None = None

    def end(self, samples: list[FinishedRequestStats], _error: Exception | None) -> None:
        """Take the samples of one of its prompts."""
        known = [*samples, *([] if self._last is None else [self._last])]
        self._last = max(known, key=lambda sample: sample.moments.end, default=None)

    def header(self) -> str | None:
        """Return the header's value, in milliseconds; None if the engine was not asked."""
        last = self._last
        if last is None:
            return None
        times = {
            "queue": last.queue_seconds,
            "prefill": last.prefill_seconds,
            "decode": last.decode_seconds,
            "total": last.e2e_seconds,
        }
        return ", ".join(f"{name};dur={1000 * value:.3f}" for name, value in times.items())


def start_timing(_request_id: str, _params: SamplingParams, _model: str) -> Timings | None:
    """Return who wants the times of an engine's request: the present HTTP request, or nobody."""
    return _TIMINGS.get()


def timing_middleware() -> Middleware:
    """Return the middleware that adds the header to answers that are not streamed.

    The headers of a stream are gone long before its times are known.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get(REQUEST_HEADER) != "1":
            return await handler(request)
        timings = Timings()
        token = _TIMINGS.set(timings)
        try:
            response = await handler(request)
        finally:
            _TIMINGS.reset(token)
        value = timings.header()
        if value is not None and not response.prepared:
            response.headers["Server-Timing"] = value
        return response

    return middleware
