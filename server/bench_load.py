"""Sends streamed requests to an OpenAI-compatible server, when they are due, and times them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np

from paged.server.bench_timeline import Timeline
from paged.server.cli_errors import UserError

_READY_SECONDS = 10.0
_RETRY_SECONDS = 0.5


class BenchClient:
    """One server's endpoint; use it as an asynchronous context manager.

    Args:
      base_url: of the server, without "/v1".
      endpoint: path of the API.
      api_key: sent with every request, if there is one.
      headers: sent with every request, too; they win over ours.
      insecure: take any certificate of an HTTPS server.

    Raises: UserError if the URL is none.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        api_key: str | None,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        insecure: bool = False,
    ) -> None:
        self._base = base_url.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise UserError(f"--base-url {base_url} is no address; write http://HOST:PORT.")
        self._url = self._base + endpoint
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._headers |= headers
        self._insecure = insecure
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # As many connections as requests: a limit here would count as the server's time.
            connector=aiohttp.TCPConnector(limit=0, ssl=not self._insecure),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def check_model(self, model: str | None, *, ready_seconds: float = 0.0) -> str:
        """Return the model to ask for: the one given, else the first of the server's list.

        Args:
          model: to ask for.
          ready_seconds: how long to ask again while nobody answers, or with 503.

        Raises: UserError if the server cannot be reached, wants another key, or names its models
          and not this one.
        """
        deadline = time.perf_counter() + ready_seconds
        while True:
            status, body = await self._list_models(deadline)
            if status != 503 or time.perf_counter() >= deadline:
                break
            await asyncio.sleep(_RETRY_SECONDS)
        if status in (401, 403):
            raise UserError(f"{self._base} refuses the API key: {_reason(status, body)}")
        names = _model_names(body) if status == 200 else []
        if model is None and not names:
            raise UserError(f"{self._base} does not name its models; give --model.")
        if model is not None and names and model not in names:
            raise UserError(
                f"the model {model} does not exist at {self._base}; it has {', '.join(names)}."
            )
        return names[0] if model is None else model

    async def _list_models(self, deadline: float) -> tuple[int, bytes]:
        """Return status and body of the list of models, asking again until the deadline.

        Raises: UserError if nobody answers.
        """
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_READY_SECONDS)
        while True:
            try:
                url = f"{self._base}/v1/models"
                async with self._session.get(url, timeout=timeout) as response:
                    return response.status, await response.read()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if time.perf_counter() >= deadline:
                    reason = str(error) or type(error).__name__
                    raise UserError(f"no server answers at {self._base}: {reason}") from None
            await asyncio.sleep(_RETRY_SECONDS)

    async def send(self, body: Mapping[str, Any], timeline: Timeline) -> None:
        """Send one streamed request and note in its timeline what happens; an error, too."""
        assert self._session is not None
        is_complete = False
        data = msgspec.json.encode(body)  # before the clock starts: it is our work
        headers = {} if timeline.request_id is None else {"X-Request-Id": timeline.request_id}
        timeline.sent = time.perf_counter()
        try:
            async with self._session.post(self._url, data=data, headers=headers) as response:
                if response.status != 200:
                    timeline.error = _reason(response.status, await response.read())
                    return
                async for line in response.content:
                    if line.startswith(b"data:"):
                        is_complete |= _note(line.removeprefix(b"data:").strip(), timeline)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            timeline.error = f"{type(error).__name__}: {error}"
        except (AttributeError, KeyError, TypeError) as error:
            timeline.error = f"the answer is none of OpenAI's: {error!r}"
        if timeline.error is None and not (is_complete and timeline.arrivals):
            what = "its end" if timeline.arrivals else "its first token"
            timeline.error = f"the answer broke off before {what}"
        timeline.finished = timeline.error is None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and the book that is kept on it.

    Attributes:
      body: to send; after the first of a session, `messages` are only those that are new.
      timeline: filled while it runs.
      pause: seconds between the end of the one before and this one.
    """

    body: Mapping[str, Any]
    timeline: Timeline
    pause: float = 0.0


async def send_all(
    client: BenchClient,
    bodies: Sequence[Mapping[str, Any]],
    timelines: Sequence[Timeline],
    due: Sequence[float] | np.ndarray,
    *,
    max_concurrency: int | None,
) -> bool:
    """Send every request when it is due, each for itself; see `send_sessions`."""
    pairs = zip(bodies, timelines, strict=True)
    sessions = [[Exchange(body, timeline)] for body, timeline in pairs]
    return await send_sessions(client, sessions, due, max_concurrency=max_concurrency)


async def send_sessions(
    client: BenchClient,
    sessions: Sequence[Sequence[Exchange]],
    due: Sequence[float] | np.ndarray,
    *,
    max_concurrency: int | None,
    on_finished: Callable[[], object] = lambda: None,
) -> bool:
    """Start every session when it is due, and fill the timelines of its exchanges.

    The exchanges of a session follow each other; each is sent with all messages and answers before
    it. When one fails, those after it fail unsent.

    Args:
      client: of the server.
      sessions, due: one of each per session; `due` in seconds from now.
      max_concurrency: most requests under way; what is due beyond that waits before it is sent.
      on_finished: called when a request has ended, well or not.

    Returns: False if it was cancelled (Ctrl-C) before all had ended.
    """
    slots = asyncio.Semaphore(max_concurrency or max(1, len(sessions)))
    start = time.perf_counter()

    async def run(session: Sequence[Exchange], seconds: float) -> None:
        await asyncio.sleep(start + seconds - time.perf_counter())
        said: list[Mapping[str, Any]] = []
        failed = False
        for exchange in session:
            timeline = exchange.timeline
            if failed:
                timeline.error = "not sent: the turn before it failed"
            else:
                if exchange.pause:
                    await asyncio.sleep(exchange.pause)
                body = exchange.body
                if said:
                    body = {**body, "messages": [*said, *body["messages"]]}
                async with slots:
                    await client.send(body, timeline)
                failed = timeline.error is not None
                if len(session) > 1:
                    answer = {"role": "assistant", "content": "".join(timeline.pieces)}
                    said = [*body["messages"], answer]
            timeline.pieces.clear()
            on_finished()

    tasks = [
        asyncio.create_task(run(session, seconds))
        for session, seconds in zip(sessions, due, strict=True)
    ]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        return False
    return True


def _note(data: bytes, timeline: Timeline) -> bool:
    """Note what a chunk says, and when it came if it holds output; return whether it is the end."""
    if data == b"[DONE]":
        return True
    chunk = msgspec.json.decode(data)
    if "error" in chunk:
        timeline.error = str(chunk["error"].get("message", chunk["error"]))
        return True
    choices = chunk.get("choices") or ()
    if any(_is_output(choice) for choice in choices):
        timeline.arrivals.append(time.perf_counter())
        if not timeline.counted_by_server:
            timeline.num_output_tokens += 1
    timeline.pieces += [text for choice in choices if (text := _text(choice))]
    if usage := chunk.get("usage"):
        timeline.counted_by_server = True
        timeline.num_prompt_tokens = usage["prompt_tokens"]
        timeline.num_output_tokens = usage["completion_tokens"]
        # Servers without a prefix cache leave this out, or write null.
        timeline.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return any(choice.get("finish_reason") for choice in choices)


def _is_output(choice: Mapping[str, Any]) -> bool:
    """Return whether a choice holds some output; the chunk that opens a chat names its role."""
    delta = choice.get("delta")
    return delta is None or "role" not in delta or bool(delta.get("content"))


def _text(choice: Mapping[str, Any]) -> str | None:
    """Return what a choice adds to the answer, the reasoning before it left out."""
    delta = choice.get("delta")
    text: str | None = choice.get("text") if delta is None else delta.get("content")
    return text


def _model_names(body: bytes) -> list[str]:
    try:
        return [str(model["id"]) for model in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []


def _reason(status: int, body: bytes) -> str:
    """Return the message of an error's body; foreign servers may have any shape."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"status {status}: {message}"
