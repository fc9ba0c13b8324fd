"""OTLP collectors in this process: they take spans, over HTTP or gRPC, and keep them."""

import concurrent.futures
import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collector:
    """What has arrived.

    Attributes:
      url: that spans are sent to.
      spans: in order of arrival, as protobuf.
      resource: attributes of whoever sent them.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource_spans in request.resource_spans:
            self.resource = _values(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Any:
        (span,) = self.named(name)
        return span


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Yield a collector that listens on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            kept.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Yield a collector that speaks gRPC on a free port."""

    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, _context: Any) -> Any:
            kept.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Service(), server)
    kept = Collector(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield kept
    finally:
        server.stop(None).wait()


def attributes(span: Any) -> dict[str, Any]:
    """Return a span's attributes as Python values."""
    return _values(span.attributes)


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
