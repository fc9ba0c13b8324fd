"""OpenAI's batch files: lines of requests in, lines of answers out, and where a run left off.

Source: https://platform.openai.com/docs/api-reference/batch/request-input.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

BATCH_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""What a line may ask for."""


class BatchRequest(Struct, kw_only=True):
    """One line of the input; `body` stays as it is written."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw

    def mistake(self) -> str | None:
        """Return what is wrong with the line beside its body, which its endpoint checks."""
        if self.method != "POST":
            return f"method must be 'POST', got {self.method[:20]!r}."
        if self.url not in BATCH_URLS:
            return f"url must be one of {', '.join(BATCH_URLS)}, got {self.url[:80]!r}."
        try:
            streams = msgspec.json.decode(self.body, type=_Shape).stream
        except msgspec.MsgspecError:
            return None  # the endpoint says what is wrong with it
        return "body.stream must be false in a batch." if streams else None


class _Shape(Struct):
    """What a batch itself must know of a body."""

    stream: Any = None


class BatchError(Struct, kw_only=True):
    """Why a line has no answer."""

    code: str
    message: str


class BatchResponse(Struct, kw_only=True):
    """What the endpoint answered, as it was sent."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(Struct, kw_only=True):
    """One line of the output; lines come in the order in which their requests end."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None


class _Done(Struct):
    custom_id: str


def read_requests(path: pathlib.Path) -> list[BatchRequest]:
    """Return the requests of a batch file.

    Raises: ValueError for a line that names no request, or one whose custom_id is taken; OSError.
    """
    decoder = msgspec.json.Decoder(BatchRequest)
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            line.decode()
            request = decoder.decode(line)
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
        first = lines.setdefault(request.custom_id, number)
        if first != number:
            raise ValueError(
                f"{path}, line {number}: custom_id {request.custom_id[:80]!r} is that of line "
                f"{first}, too; answers could not be told apart."
            )
        requests.append(request)
    return requests


def read_done(path: pathlib.Path) -> set[str]:
    """Return the custom_ids that an output file answers; a line that was cut off is removed.

    Raises: ValueError if the file holds anything else than results; OSError.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    decoder = msgspec.json.Decoder(_Done)
    done: set[str] = set()
    for number, line in _lines_of(content[:whole]):
        try:
            done.add(decoder.decode(line).custom_id)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{path}, line {number} is no result of a batch ({error}); give another "
                "--output-file."
            ) from None
    if whole != len(content):  # the run before this one ended while it wrote
        if not content.startswith(b"{"):
            raise ValueError(f"{path} holds no results of a batch; give another --output-file.")
        with path.open("r+b") as file:
            file.truncate(whole)
    return done


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    return _lines_of(path.read_bytes())


def _lines_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, line
