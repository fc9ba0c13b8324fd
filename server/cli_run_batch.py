"""`paged run-batch`: answers the requests of a batch file; run again, it goes on where it ended."""

import argparse
import asyncio
import pathlib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
from tqdm import tqdm

from paged.server.batch_file import (
    BatchError,
    BatchRequest,
    BatchResponse,
    BatchResult,
    read_done,
    read_requests,
)
from paged.server.cli_engine import open_client
from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_settings import set_up_logging
from paged.server.client import Client

# A full queue, or a server of somebody else that is full: waited for, not an answer.
_BUSY = 429
# Where the server does not say how long.
_RETRY_SECONDS = 1.0
# What says that no later request will be served either.
_GONE = frozenset({401, 503})


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet; return 0, also if some requests were refused.

    Raises: UserError if a file cannot be used, or the model not be loaded or served.
    """
    set_up_logging(args.log_level)
    output = pathlib.Path(args.output_file)
    with user_errors():
        requests = read_requests(pathlib.Path(args.input_file))
        done = read_done(output)
        waiting = [request for request in requests if request.custom_id not in done]
        if not waiting:
            _report(_Counts(num_skipped=len(requests)))
            return 0
        file = output.open("ab")
    counts = _Counts(num_skipped=len(requests) - len(waiting))
    bar = tqdm(
        total=len(requests),
        initial=counts.num_skipped,
        desc="Batch",
        unit="request",
        disable=None,  # where standard error is no terminal
    )
    with file, bar:
        asyncio.run(_answer_all(args, waiting, _Output(file, bar, counts)))
    _report(counts)
    return 0


@dataclass(slots=True)
class _Counts:
    """Requests by what became of them (mutable)."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0


class _Output:
    """Where results go; each is in the file before the next one is waited for."""

    def __init__(self, file: BinaryIO, bar: "tqdm[object]", counts: _Counts) -> None:
        self._file = file
        self._bar = bar
        self._counts = counts

    def write(self, result: BatchResult) -> None:
        """Append a line."""
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()
        if result.error is None:
            self._counts.num_answered += 1
        else:
            self._counts.num_failed += 1
        self._bar.update()


async def _answer_all(
    args: argparse.Namespace, requests: list[BatchRequest], output: _Output
) -> None:
    """Answer requests, so many at once; the first error that concerns all ends it."""
    names = args.served_model_name or ()
    async with open_client(args, served_model_names=names) as client:
        queue = iter(requests)
        num_workers = min(args.max_concurrency, len(requests))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_workers):
                    group.create_task(_work(client, queue, output))
        except* UserError as errors:
            raise errors.exceptions[0] from None


async def _work(client: Client, queue: Iterator[BatchRequest], output: _Output) -> None:
    for request in queue:
        output.write(await _answer(client, request))


async def _answer(client: Client, request: BatchRequest) -> BatchResult:
    """Return the result of one request.

    Raises: UserError if the server is gone.
    """
    result_id = f"batch_req_{uuid.uuid4().hex}"
    if mistake := request.mistake():
        return BatchResult(
            id=result_id,
            custom_id=request.custom_id,
            response=None,
            error=BatchError(code="invalid_request", message=mistake),
        )
    request_id = uuid.uuid4().hex
    path = request.url.removeprefix("/v1/")
    while True:
        answer = await client.post(path, bytes(request.body), request_id=request_id)
        if answer.status != _BUSY:
            break
        wanted = answer.retry_seconds
        await asyncio.sleep(_RETRY_SECONDS if wanted is None else wanted)
    status, body, error = answer.status, answer.body, None
    if status != 200:
        message = client.reason(body, status)
        if status in _GONE:
            raise UserError(f"{message} Run the command again to go on from here.")
        error = BatchError(code=str(status), message=message)
    return BatchResult(
        id=result_id,
        custom_id=request.custom_id,
        response=BatchResponse(status_code=status, request_id=request_id, body=_as_json(body)),
        error=error,
    )


def _as_json(body: bytes) -> msgspec.Raw:
    """Return a body to be embedded; one that is no JSON, as a string."""
    try:
        msgspec.json.decode(body)
    except msgspec.DecodeError:
        body = msgspec.json.encode(body.decode(errors="replace"))
    # A line is a line, however a foreign server spells its JSON.
    return msgspec.Raw(msgspec.json.format(body, indent=-1))


def _report(counts: _Counts) -> None:
    parts: Iterable[tuple[int, str]] = (
        (counts.num_answered, "answered"),
        (counts.num_failed, "failed"),
        (counts.num_skipped, "skipped (answered before)"),
    )
    print(", ".join(f"{count} {what}" for count, what in parts))
