"""`HttpMetrics`: requests by route and status, with the names that FastAPI servers give them."""

import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

_FINE_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip
_COARSE_SECONDS = (0.1, 0.5, 1)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

NOT_COUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
"""Routes that are neither counted nor traced: probes would drown the rest."""

# A list, because a request that is routed again is a copy, and both share the list.
_ROUTED = web.RequestKey("routed", list[str])


class HttpMetrics:
    """Counts requests, their sizes and how long their answers took to the last byte.

    The labels are few, whatever clients send: paths are the templates of routes ("none" where
    there is no such route), methods beyond those of RFC 9110 are "OTHER", statuses are 2xx and so
    on. A size is what the header Content-Length says, and 0 for streams.

    Args:
      registry: that shows them.

    Source: prometheus-fastapi-instrumentator, `metrics.default`, as vLLM uses it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "Requests by method, status and handler.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._request_bytes = Summary(
            "http_request_size_bytes",
            "Content length of requests by handler.",
            ("handler",),
            registry=registry,
        )
        self._response_bytes = Summary(
            "http_response_size_bytes",
            "Content length of answers by handler.",
            ("handler",),
            registry=registry,
        )
        self._fine_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "Time to the last byte of the answer, in many buckets.",
            buckets=_FINE_SECONDS,
            registry=registry,
        )
        self._coarse_seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the last byte of the answer, by handler and method.",
            ("handler", "method"),
            buckets=_COARSE_SECONDS,
            registry=registry,
        )

    def middleware(self) -> Middleware:
        """Return the middleware that counts; must be the outermost, which sees every answer."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[_ROUTED] = []
            started = time.perf_counter()
            status, num_bytes = 500, 0
            try:
                response = await handler(request)
                status, num_bytes = response.status, response.content_length or 0
                return response
            finally:
                if (name := route_of(request)) not in NOT_COUNTED:
                    seconds = time.perf_counter() - started
                    self._observe(request, name, status, num_bytes, seconds)

        return middleware

    def _observe(
        self, request: web.Request, name: str, status: int, num_bytes: int, seconds: float
    ) -> None:
        method = request.method if request.method in _METHODS else "OTHER"
        self._requests.labels(method, f"{status // 100}xx", name).inc()
        self._request_bytes.labels(name).observe(request.content_length or 0)
        self._response_bytes.labels(name).observe(num_bytes)
        self._fine_seconds.observe(seconds)
        self._coarse_seconds.labels(name, method).observe(seconds)


def note_route(request: web.Request, match: web.UrlMappingMatchInfo) -> None:
    """Let the metrics know the route of a request that was routed again, under another path."""
    if (routed := request.get(_ROUTED)) is not None:
        routed[:] = [_template(match)]


def route_of(request: web.Request) -> str:
    """Return the template of the route that answered a request, "none" if there is none."""
    routed = request.get(_ROUTED)
    return routed[0] if routed else _template(request.match_info)


def _template(match: web.UrlMappingMatchInfo) -> str:
    resource = match.route.resource
    return "none" if resource is None else resource.canonical
