"""`make_tracing`: spans to a collector by OTLP over HTTP, in the background."""

from typing import TYPE_CHECKING

from paged._version import __version__
from paged.server.observability import ObservabilitySettings

if TYPE_CHECKING:
    from paged.server.tracing import Tracing


def make_tracing(settings: ObservabilitySettings, model_name: str) -> "Tracing | None":
    """Return what traces requests; None, and nothing is imported, if that is not wanted.

    Spans are exported in batches by a thread; when the collector does not answer they are dropped,
    with a line in the log.

    Raises: ValueError if OpenTelemetry is not installed.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from paged.server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs the extra `otel` ({error}); pip install 'paged[otel]'."
        ) from error
    resource = Resource.create(
        {"service.name": settings.service_name, "service.version": __version__}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=settings.otlp_traces_endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, model_name, settings.detailed_traces)
