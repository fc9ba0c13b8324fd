"""Values of the options of `paged bench`: counts, shares, rates, objectives and the like."""

import argparse
import json
import math
import re
from typing import Any

from paged.server.bench_names import METRICS
from paged.server.cli_options import size

OBJECTIVES = ("ttft", "tpot", "e2el")
"""What `--goodput` may bound: what a single request has one of."""


def count(text: str) -> int:
    """Parse a size of at least 1."""
    value = size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; give 1 or more")
    return value


def ratio(text: str) -> float:
    """Parse a share of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 and below 1")
    return value


def rate(text: str) -> float:
    """Parse a number above 0, which may be inf."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0; inf is allowed")
    return value


def seconds(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; write {{"top_k": 5}}')
    return value


def objective(text: str) -> tuple[str, float]:
    """Parse a bound in milliseconds, such as ttft:500."""
    name, _, bound = text.partition(":")
    if name not in OBJECTIVES:
        raise argparse.ArgumentTypeError(
            f"{text!r} bounds none of {', '.join(OBJECTIVES)}; write ttft:500, in milliseconds"
        )
    return name, rate(bound)


def metadata(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    return key, value


def header(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE of an HTTP header."""
    name, equals, value = text.partition("=")
    if not (re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no header; write X-Tenant=blue")
    return name, value


def metrics(text: str) -> list[str]:
    """Parse latencies, separated by commas, in the order of `METRICS`."""
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in METRICS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no latency; known are {', '.join(METRICS)}"
        )
    return [name for name in METRICS if name in wanted]


def percentiles(text: str) -> list[float]:
    """Parse percentiles, separated by commas, such as 50,90,99.9."""
    values = [_number(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a percentile that is not from 0 to 100")
    return values


def variation(text: str) -> tuple[str, list[str]]:
    """Parse NAME=VALUE,VALUE,...: an option, without its dashes, and what it is to be in turn."""
    name, _, listed = text.partition("=")
    name = name.removeprefix("--").replace("_", "-")
    values = [value.strip() for value in listed.split(",")]
    if not name or not all(values):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE,VALUE; write request-rate=1,2")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value twice")
    return name, values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
