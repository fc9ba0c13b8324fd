"""`make_tracing`: spans to a collector by OTLP, over HTTP or gRPC, in the background."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paged._version import __version__
from paged.server.observability import ObservabilitySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

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
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from paged.server.tracing import Tracing

        exporter = _make_exporter(settings.otlp_traces_endpoint, settings.otlp_protocol)
    except ModuleNotFoundError as error:
        extra = "otel-grpc" if settings.otlp_protocol == "grpc" else "otel"
        raise ValueError(
            f"--otlp-traces-endpoint {settings.otlp_traces_endpoint} needs the extra `{extra}` "
            f"({error}); pip install 'paged[{extra}]'."
        ) from error
    resource = Resource.create(
        {"service.name": settings.service_name, "service.version": __version__}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, model_name, settings.detailed_traces)


def _make_exporter(endpoint: str, protocol: str) -> "SpanExporter":
    """Return what sends spans there.

    Raises: ModuleNotFoundError if it is not installed.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        parts = urlsplit(endpoint)
        is_plain = parts.scheme in ("grpc", "http")
        return GrpcExporter(endpoint=parts.netloc, insecure=is_plain)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)
