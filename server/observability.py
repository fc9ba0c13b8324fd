"""`ObservabilitySettings`: what operators get to see of requests, beside metrics."""

from dataclasses import dataclass

DETAILS = {"model": "host_copies", "worker": "detokenize"}
"""Modules of `--collect-detailed-traces`, and the work that is measured for each."""

OTLP_PROTOCOLS = {
    "http/protobuf": ("http://", "https://"),
    "grpc": ("grpc://", "grpcs://", "http://", "https://"),
}
"""How spans are sent, by OpenTelemetry's names, and how URLs for it may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilitySettings:
    """Settings of traces, request logs and profiles; by default all of it is off.

    Attributes:
      otlp_traces_endpoint: URL that spans are sent to, such as "http://localhost:4318/v1/traces",
        or for gRPC "grpc://localhost:4317" ("grpcs://" with TLS; "http://" and "https://" do, too).
      otlp_protocol: a name of `OTLP_PROTOCOLS`.
      service_name: of the spans.
      detailed_traces: kinds of work, of `DETAILS`, that requests get spans for.
      max_log_len: most characters, and token ids, of a prompt in the log; None: all.
      profile_dir: folder that /start_profile writes to; None: there is no such route.

    Raises: ValueError for values that contradict each other.
    """

    otlp_traces_endpoint: str | None = None
    otlp_protocol: str = "http/protobuf"
    service_name: str = "paged"
    detailed_traces: frozenset[str] = frozenset()
    max_log_len: int | None = None
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if self.otlp_protocol not in OTLP_PROTOCOLS:
            known = ", ".join(OTLP_PROTOCOLS)
            raise ValueError(f"otlp_protocol={self.otlp_protocol!r} is none of {known}.")
        schemes = OTLP_PROTOCOLS[self.otlp_protocol]
        if endpoint is not None and not endpoint.startswith(schemes):
            raise ValueError(
                f"otlp_traces_endpoint={endpoint!r} must be a URL, such as "
                "http://localhost:4318/v1/traces, or grpc://localhost:4317."
            )
        if unknown := sorted(self.detailed_traces - set(DETAILS.values())):
            known = ", ".join(DETAILS.values())
            raise ValueError(f"detailed_traces has unknown {unknown[0]!r}; known are {known}.")
        if self.detailed_traces and endpoint is None:
            raise ValueError("detailed_traces needs otlp_traces_endpoint: nothing is traced.")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ValueError(f"max_log_len={self.max_log_len} must not be negative.")
