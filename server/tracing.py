"""`Tracing`: OpenTelemetry spans of HTTP requests, of what the engine did for them, of start-up.

Needs the extra `otel`; imported only where traces are wanted.
"""

import time
from collections.abc import Sequence
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paged.scheduler.output import FinishedRequestStats
from paged.scheduler.params import SamplingParams
from paged.scheduler.startup import Phase
from paged.server.http_metrics import NOT_COUNTED, route_of
from paged.server.json_log import TRACE_ID

_SPAN = web.RequestKey("span", Span)
_PROPAGATOR = TraceContextTextMapPropagator()

# Set by the middleware and read where the engine is asked, in the same task or one it started.
_PARENT: ContextVar[Context | None] = ContextVar("trace_parent", default=None)


class Tracing:
    """Makes spans and hands them to a provider.

    Args:
      provider: exports them; owned.
      model_name: reported with the start-up.
      details: kinds of work, of what the engine has measured, that get spans.
    """

    def __init__(
        self, provider: TracerProvider, model_name: str, details: frozenset[str] = frozenset()
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("paged")
        self._model_name = model_name
        self._details = details

    def middleware(self) -> Middleware:
        """Return the middleware that makes a span of each HTTP request but probes.

        Its parent is that of the header `traceparent`; the answer names it (`add_trace_header`).
        """

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.rel_url.raw_path in NOT_COUNTED:
                return await handler(request)
            caller = _PROPAGATOR.extract(request.headers, context=Context())
            span = self._tracer.start_span(
                request.method, context=caller, kind=SpanKind.SERVER,
                attributes={
                    "http.request.method": request.method,
                    "url.path": request.rel_url.raw_path,
                },
            )  # fmt: skip
            request[_SPAN] = span
            parent = _PARENT.set(set_span_in_context(span, caller))
            trace_id = TRACE_ID.set(f"{span.get_span_context().trace_id:032x}")
            try:
                response = await handler(request)
                _end_http_span(span, request, response.status)
                return response
            except BaseException as error:
                span.record_exception(error)
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise
            finally:
                span.end()
                TRACE_ID.reset(trace_id)
                _PARENT.reset(parent)

        return middleware

    def start_request(self, request_id: str, params: SamplingParams, model: str) -> "RequestTrace":
        """Return what makes the spans of an engine's request, below the present HTTP request's."""
        parent = _PARENT.get() or Context()
        return RequestTrace(self, request_id, params, model, parent)

    def trace_startup(self, phases: Sequence[Phase]) -> None:
        """Make a span of the start-up, and one of each of its phases below it."""
        if not phases:
            return
        clock = _WallClock()
        end = max(phase.started + phase.seconds for phase in phases)
        started = clock.ns(phases[0].started)
        root = self._tracer.start_span("startup", context=Context(), start_time=started)
        root.set_attribute("gen_ai.request.model", self._model_name)
        inside = set_span_in_context(root, Context())
        for phase in phases:
            start = clock.ns(phase.started)
            span = self._tracer.start_span(phase.name, context=inside, start_time=start)
            span.end(clock.ns(phase.started + phase.seconds))
        root.end(clock.ns(end))

    def close(self) -> None:
        """Export what is left; waits for the collector, for a while."""
        self._provider.shutdown()


async def add_trace_header(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the caller trace and span of its request, as W3C's `traceresponse`.

    For `app.on_response_prepare`.
    """
    if (span := request.get(_SPAN)) is not None:
        ids = span.get_span_context()
        response.headers["traceresponse"] = (
            f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
        )


class RequestTrace:
    """Makes the spans of one request when it has ended; a `Watcher`.

    Source: vLLM `v1/engine/output_processor.py`, `do_tracing`.
    """

    def __init__(
        self,
        tracing: Tracing,
        request_id: str,
        params: SamplingParams,
        model: str,
        parent: Context,
    ) -> None:
        self._tracer = tracing._tracer
        self._details = tracing._details
        self._attributes: dict[str, str | float | None] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
        }
        self._parent = parent
        self._started = time.monotonic()

    def end(self, samples: list[FinishedRequestStats], error: Exception | None) -> None:
        """Make the spans: the request, and below it what each sample went through."""
        clock = _WallClock()
        started = min((s.moments.arrival for s in samples), default=self._started)
        ended = max((s.moments.end for s in samples), default=time.monotonic())
        span = self._tracer.start_span(
            "llm_request", self._parent, SpanKind.SERVER, start_time=clock.ns(started)
        )
        # As in the reference: what is zero or absent is left out.
        span.set_attributes({k: v for k, v in self._attributes.items() if v})
        if samples:
            span.set_attributes(_usage(samples))
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        inside = set_span_in_context(span, Context())
        for sample in samples:
            self._trace_sample(sample, inside, clock, has_siblings=len(samples) > 1)
        span.end(clock.ns(ended))

    def _trace_sample(
        self,
        sample: FinishedRequestStats,
        parent: Context,
        clock: "_WallClock",
        *,
        has_siblings: bool,
    ) -> None:
        moments = sample.moments
        spans: list[tuple[str, float, float, dict[str, float]]] = [
            ("queue", moments.queued, moments.scheduled, {}),
            ("prefill", moments.scheduled, moments.first_token, {}),
            ("decode", moments.first_token, moments.last_token, {}),
        ]
        spans += [
            (kind, work.started, work.ended,
             {"paged.busy_seconds": work.seconds, "paged.num_steps": work.count})
            for kind, work in sample.work.items()
            if kind in self._details
        ]  # fmt: skip
        for name, start, end, attributes in spans:
            if not (start and end):
                continue  # never got there
            if has_siblings:
                attributes = {**attributes, "paged.sample_index": sample.index}
            span = self._tracer.start_span(
                name, parent, start_time=clock.ns(start), attributes=attributes
            )
            span.end(clock.ns(end))


def _usage(samples: Sequence[FinishedRequestStats]) -> dict[str, int | float | list[str]]:
    """Return the attributes of a request's samples; times are those of the one that ended last."""
    last = max(samples, key=lambda sample: sample.moments.end)
    arrival = last.moments.arrival
    attributes: dict[str, int | float | list[str]] = {
        "gen_ai.usage.prompt_tokens": last.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(s.num_generation_tokens for s in samples),
        "gen_ai.response.finish_reasons": [
            s.finish_reason for s in sorted(samples, key=lambda sample: sample.index)
        ],
        "gen_ai.latency.e2e": last.e2e_seconds,
        "gen_ai.latency.time_in_queue": last.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": last.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": last.decode_seconds,
        "gen_ai.latency.time_in_model_inference": last.inference_seconds,
    }
    firsts = [s.moments.first_token for s in samples if s.moments.first_token]
    if firsts:
        attributes["gen_ai.latency.time_to_first_token"] = min(firsts) - arrival
    return attributes


def _end_http_span(span: Span, request: web.Request, status: int) -> None:
    route = route_of(request)
    span.update_name(f"{request.method} {route}")
    span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


class _WallClock:
    """Monotonic seconds to nanoseconds since 1970, as the two clocks stand to each other now."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_seconds: float) -> int:
        return self._offset + int(monotonic_seconds * 1e9)
