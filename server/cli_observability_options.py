"""Options of the command line about traces, logs and profiles, and what they become."""

import argparse
import os
from typing import Any

from paged.scheduler.config import EngineConfig
from paged.server.cli_options import size
from paged.server.observability import DETAILS, OTLP_PROTOCOLS, ObservabilitySettings

LOG_FORMATS = ("text", "json")


def traced_modules(text: str) -> frozenset[str]:
    """Parse the modules of detailed traces, separated by commas."""
    names = set(text.split(","))
    if unknown := sorted(names - {*DETAILS, "all"}):
        raise argparse.ArgumentTypeError(
            f"unknown {unknown[0]!r}; known are {', '.join(DETAILS)} and all"
        )
    return frozenset(DETAILS if "all" in names else names)


def add_observability_options(parser: argparse.ArgumentParser) -> None:
    """Add what operators want to see of requests."""
    group = parser.add_argument_group("observability")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces there by OTLP, such as http://localhost:4318/v1/traces, "
        "which needs the extra `otel`, or grpc://localhost:4317, which needs the extra `otel-grpc`",
    )
    group.add_argument(
        "--collect-detailed-traces",
        type=traced_modules,
        default=frozenset(),
        metavar="MODULES",
        help="measure more for traces: model (waiting for the device's tokens), worker "
        "(detokenisation), all",
    )
    _add_metrics_options(group)
    group.add_argument(
        "--max-log-len",
        type=size,
        metavar="N",
        help="most characters, and token ids, of a prompt in the log of requests, which has "
        "prompts at --log-level debug only (default: all)",
    )
    group.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="json: an object per line"
    )
    group.add_argument(
        "--profile-dir",
        metavar="DIR",
        help="serve POST /start_profile and /stop_profile, which write JAX profiles there",
    )


def _add_metrics_options(group: "argparse._ArgumentGroup") -> None:
    defaults = EngineConfig()
    group.add_argument(
        "--kv-cache-metrics",
        action=argparse.BooleanOptionalAction,
        default=defaults.kv_cache_metrics,
        help="show at /metrics how long KV blocks stay, idle and are reused, by a sample of them",
    )
    group.add_argument(
        "--kv-cache-metrics-sample",
        type=float,
        default=defaults.kv_cache_metrics_sample,
        metavar="SHARE",
        help="share of the blocks in that sample, above 0 to 1",
    )
    group.add_argument(
        "--enable-mfu-metrics",
        action=argparse.BooleanOptionalAction,
        default=defaults.enable_mfu_metrics,
        help="show at /metrics the FLOPs and the bytes of memory traffic of each GPU, estimated "
        "from the model's size",
    )


def metrics_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineConfig` about metrics; none for a command without them."""
    names = ("kv_cache_metrics", "kv_cache_metrics_sample", "enable_mfu_metrics")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def observability_settings(args: argparse.Namespace) -> ObservabilitySettings:
    """Return the settings; the service's name is $OTEL_SERVICE_NAME or "paged".

    The protocol is gRPC for an endpoint of grpc:// or grpcs://, else what the environment says.

    Raises: ValueError for values that contradict each other.
    """
    endpoint = args.otlp_traces_endpoint
    return ObservabilitySettings(
        otlp_traces_endpoint=endpoint,
        otlp_protocol="http/protobuf" if endpoint is None else _otlp_protocol(endpoint),
        service_name=os.environ.get("OTEL_SERVICE_NAME") or "paged",
        detailed_traces=frozenset(DETAILS[module] for module in args.collect_detailed_traces),
        max_log_len=args.max_log_len,
        profile_dir=args.profile_dir and os.path.expanduser(args.profile_dir),
    )


def _otlp_protocol(endpoint: str) -> str:
    """Return how to send traces to an endpoint.

    Raises: ValueError for a protocol of the environment that there is not.
    """
    if endpoint.startswith(("grpc://", "grpcs://")):
        return "grpc"
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return "http/protobuf"
    if os.environ[name] not in OTLP_PROTOCOLS:
        known = ", ".join(OTLP_PROTOCOLS)
        raise ValueError(f"${name}={os.environ[name]} is not known; set it to one of {known}.")
    return os.environ[name]
