"""Traces as files: the project's own JSON Lines and Mooncake's, read as streams.

A line of the project's format is one JSON object, earliest arrival first:

    {"prompt": [["system", 500], ["user-0", 80]], "output_tokens": 250, "arrival_seconds": 1.5,
     "output": "answer-0", "priority": 0, "pass": 0, "session": "s0"}

`prompt` is a list of [content, tokens]: equal contents (strings or integers) mean equal tokens,
and a shorter piece is the beginning of a longer one. Only `prompt` and `output_tokens` are
required; `output` names the generated content, so that a later prompt can repeat it.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paged.scheduler.simulator.trace import Segment, Trace, TraceRequest

MOONCAKE_BLOCK = 512
"""Tokens that one entry of `hash_ids` stands for."""


class TraceError(ValueError):
    """A line of a trace file is not what its format asks for; names file and line."""


def read_jsonl(path: str | pathlib.Path) -> Trace:
    """Return the trace in a file of the project's format.

    Raises: OSError now if the file cannot be opened; TraceError while reading, for a bad line.
    """
    return _trace(path, _own_request)


def read_mooncake(path: str | pathlib.Path) -> Trace:
    """Return the trace in a file of Mooncake's format.

    Each line has `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one
    id per 512 tokens of the prompt, the last of which may be partial. An id covers all that is
    before it. Any block size can be simulated: within an id, blocks are parts of it.

    Raises: OSError now if the file cannot be opened; TraceError while reading, for a bad line.
    Source: Mooncake, arXiv:2407.00079, and the traces published with it.
    """
    return _trace(path, _mooncake_request)


def write_jsonl(requests: Iterable[TraceRequest], path: str | pathlib.Path) -> int:
    """Write requests in the project's format and return how many there were."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(_to_line(request), separators=(",", ":")) + "\n")
            count += 1
    return count


def _trace(path: str | pathlib.Path, parse: Callable[[dict[str, Any]], TraceRequest]) -> Trace:
    path = pathlib.Path(path)
    # Read once for the count, which also reports a missing file here and not in the first step.
    with open(path, "rb") as file:
        num_requests = sum(1 for line in file if line.strip())

    def generate() -> Iterator[TraceRequest]:
        latest = 0.0
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    request = parse(json.loads(line))
                    _check(request, latest)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    what = f"no {error}" if isinstance(error, KeyError) else str(error)
                    raise TraceError(f"{path}, line {number}: {what}") from error
                latest = request.arrival_seconds
                yield request

    return Trace(path.stem, generate, num_requests, has_arrivals=True)


def _check(request: TraceRequest, latest: float) -> None:
    if not request.prompt or any(num_tokens < 1 for _, num_tokens in request.prompt):
        raise ValueError("the prompt must have segments, each of at least one token")
    if request.output_tokens < 1:
        raise ValueError(f"output of {request.output_tokens} tokens must have at least one")
    if request.arrival_seconds < latest:
        raise ValueError(
            f"arrives at {request.arrival_seconds} s, before the line above; sort the lines"
        )


def _own_request(fields: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        prompt=tuple([(_content(content), int(count)) for content, count in fields["prompt"]]),
        output_tokens=int(fields["output_tokens"]),
        arrival_seconds=float(fields.get("arrival_seconds", 0.0)),
        output=fields.get("output"),
        priority=int(fields.get("priority", 0)),
        pass_index=int(fields.get("pass", 0)),
        session=fields.get("session"),
    )


def _content(value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise TypeError(f"content {value!r} must be a string or an integer")
    return value


def _to_line(request: TraceRequest) -> dict[str, Any]:
    optional = (
        ("arrival_seconds", request.arrival_seconds, 0.0),
        ("output", request.output, None),
        ("priority", request.priority, 0),
        ("pass", request.pass_index, 0),
        ("session", request.session, None),
    )
    line: dict[str, Any] = {"prompt": request.prompt, "output_tokens": request.output_tokens}
    return line | {name: value for name, value, default in optional if value != default}


def _mooncake_request(fields: dict[str, Any]) -> TraceRequest:
    input_tokens, hash_ids = int(fields["input_length"]), fields["hash_ids"]
    if len(hash_ids) != -(-input_tokens // MOONCAKE_BLOCK):
        raise ValueError(
            f"{len(hash_ids)} hash_ids do not cover input_length={input_tokens}: there must be "
            f"one per {MOONCAKE_BLOCK} tokens"
        )
    prompt: list[Segment] = [(int(hash_id), MOONCAKE_BLOCK) for hash_id in hash_ids]
    prompt[-1] = (prompt[-1][0], input_tokens - (len(prompt) - 1) * MOONCAKE_BLOCK)
    return TraceRequest(
        prompt=tuple(prompt),
        output_tokens=int(fields["output_length"]),
        arrival_seconds=float(fields["timestamp"]) / 1000,
    )
