"""`ObservabilitySettings`: what operators get to see of requests, beside metrics."""

from dataclasses import dataclass

DETAILS = {"model": "host_copies", "worker": "detokenize"}
"""Modules of `--collect-detailed-traces`, and the work that is measured for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilitySettings:
    """Settings of traces, request logs and profiles; by default all of it is off.

    Attributes:
      otlp_traces_endpoint: URL that spans are sent to by OTLP over HTTP, such as
        "http://localhost:4318/v1/traces".
      service_name: of the spans.
      detailed_traces: kinds of work, of `DETAILS`, that requests get spans for.
      max_log_len: most characters, and token ids, of a prompt in the log; None: all.
      profile_dir: folder that /start_profile writes to; None: there is no such route.

    Raises: ValueError for values that contradict each other.
    """

    otlp_traces_endpoint: str | None = None
    service_name: str = "paged"
    detailed_traces: frozenset[str] = frozenset()
    max_log_len: int | None = None
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_traces_endpoint={endpoint!r} must be a URL, such as "
                "http://localhost:4318/v1/traces."
            )
        if unknown := sorted(self.detailed_traces - set(DETAILS.values())):
            known = ", ".join(DETAILS.values())
            raise ValueError(f"detailed_traces has unknown {unknown[0]!r}; known are {known}.")
        if self.detailed_traces and endpoint is None:
            raise ValueError("detailed_traces needs otlp_traces_endpoint: nothing is traced.")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ValueError(f"max_log_len={self.max_log_len} must not be negative.")
