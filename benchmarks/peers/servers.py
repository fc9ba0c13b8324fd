"""Competitors behind HTTP: a server under load, and a server that is started for every job."""

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers.competitors import Process
from benchmarks.peers.protocol import Job, Outcome
from paged.server.bench_load import BenchClient, send_all
from paged.server.bench_timeline import Timeline

_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05

type StartServer = Callable[[int], Process]
"""Starts a server on a port."""


class HttpServer:
    """A running server; the prompts of a job are sent at once, as streamed completions.

    Args:
      start: starts it.
      timeout: seconds until it has to answer.

    Raises: CompetitorError if it does not come up.
    """

    def __init__(self, start: StartServer, *, timeout: float) -> None:
        with _reserved_port() as port:
            started = time.perf_counter()
            self._url = f"http://127.0.0.1:{port}"
            self._process = start(port)
            try:
                self._model = _wait_for_token(self._process, self._url, timeout)
            except BaseException:
                self._process.kill()
                raise
            seconds = time.perf_counter() - started
        self.description: dict[str, Any] = {"load_seconds": seconds}

    def run(self, job: Job) -> Outcome:
        timelines, seconds = asyncio.run(self._send(job))
        errors = [timeline.error for timeline in timelines if timeline.error is not None]
        if errors:
            raise self._process.error(f"{len(errors)} requests failed: {errors[0]}")
        return Outcome(seconds, [timeline.num_output_tokens for timeline in timelines])

    def sessions(self) -> list[int]:
        return [self._process.child.pid]

    def close(self) -> None:
        self._process.terminate(_STOP_SECONDS)

    async def _send(self, job: Job) -> tuple[list[Timeline], float]:
        bodies = [_body(self._model, prompt, job.output_len) for prompt in job.prompts]
        timelines = [Timeline(num_prompt_tokens=len(prompt)) for prompt in job.prompts]
        async with BenchClient(self._url, "/v1/completions", None) as client:
            start = time.perf_counter()
            due = np.zeros(len(bodies))
            await send_all(client, bodies, timelines, due, max_concurrency=None)
            return timelines, time.perf_counter() - start


class ServerStart:
    """A server that is started anew for every job and stopped after its first token.

    Args:
      start: starts it.
      timeout: seconds until it has to answer.
    """

    def __init__(self, start: StartServer, *, timeout: float) -> None:
        self._start = start
        self._timeout = timeout
        self._process: Process | None = None
        self.description: dict[str, Any] = {}

    def run(self, job: Job) -> Outcome:
        """Start the server; the job's prompts do not matter. Raises: CompetitorError."""
        with _reserved_port() as port:
            started = time.perf_counter()
            self._process = process = self._start(port)
            try:
                _wait_for_token(process, f"http://127.0.0.1:{port}", self._timeout)
                return Outcome(time.perf_counter() - started, [job.output_len] * len(job.prompts))
            finally:
                process.terminate(_STOP_SECONDS)

    def sessions(self) -> list[int]:
        return [] if self._process is None else [self._process.child.pid]

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a port that nobody gets by chance; a server that asks for its number does."""
    with socket.socket() as holder:
        # Servers set one or the other before they bind.
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _wait_for_token(process: Process, url: str, timeout: float) -> str:
    """Wait until the server has generated a token; return its model's name."""
    deadline = time.monotonic() + timeout
    while process.child.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=timeout) as response:
                model: str = json.load(response)["data"][0]["id"]
            data = json.dumps(_body(model, list(range(100, 116)), 1)).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", data, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=timeout) as response:
                response.read()
            return model
        except urllib.error.HTTPError as error:
            raise process.error(f"the server answered with {error.code}") from None
        except (urllib.error.URLError, ConnectionError):
            time.sleep(_POLL_SECONDS)
    status = process.child.poll()
    what = f"no token after {timeout:.0f} s" if status is None else f"it ended with {status}"
    raise process.error(f"the server did not come up: {what}")


def _body(model: str, prompt: list[int], output_len: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
