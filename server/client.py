"""A small client of the API, for the terminal commands: streams text, turns errors into words."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from paged.server.cli_errors import UserError


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered.

    Attributes:
      status: HTTP status.
      body: as it was sent.
      retry_seconds: how long it asks to be left alone; None if it does not say.
    """

    status: int
    body: bytes
    retry_seconds: float | None


class Client:
    """Speaks to one server; use it as an asynchronous context manager.

    Args:
      url: of the API, such as http://localhost:8000/v1; "/v1" may be left out.
      api_key: sent with every request.
      model: name sent with every request; None lets the server use its own.

    Raises: UserError if the URL is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        try:
            self._base = URL(url)
        except ValueError:
            self._base = URL()
        if self._base.scheme not in ("http", "https") or not self._base.host:
            raise UserError(f"--url {url} is no address; write http://HOST:PORT/v1.")
        if self._base.path in ("", "/"):
            self._base = self._base / "v1"
        self._model = {} if model is None else {"model": model}
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> URL:
        """Address of the API."""
        return self._base

    async def __aenter__(self) -> Self:
        # No total timeout: an answer may be as long as it likes, as long as it goes on.
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
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

    async def chat(
        self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """Yield the answer to a conversation, piece by piece.

        Raises: UserError if the server cannot be reached or refuses.
        """
        body = {"messages": messages, **sampling}
        async for chunk in self._stream("chat/completions", body):
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    yield text

    async def complete(
        self, prompts: Sequence[str], sampling: Mapping[str, Any]
    ) -> AsyncIterator[tuple[int, str, bool]]:
        """Yield (index of the prompt, piece of its continuation, whether it is the last piece).

        Raises: UserError if the server cannot be reached or refuses.
        """
        body = {"prompt": prompts, **sampling}
        async for chunk in self._stream("completions", body):
            for choice in chunk["choices"]:
                yield choice["index"], choice["text"], choice["finish_reason"] is not None

    async def post(self, path: str, body: bytes, *, request_id: str) -> Answer:
        """Return the answer to a JSON body, whatever it is.

        Args:
          path: behind the address of the API, such as chat/completions.
          body: sent as it is.
          request_id: becomes part of the answer's id.

        Raises: UserError if the server cannot be reached.
        """
        assert self._session is not None
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        try:
            async with self._session.post(self._base / path, data=body, headers=headers) as answer:
                retry_seconds = _retry_seconds(answer.headers.get("Retry-After", ""))
                return Answer(answer.status, await answer.read(), retry_seconds)
        except aiohttp.ClientError as error:
            raise UserError(f"{self._base}: {error}") from None

    def reason(self, body: bytes, status: int) -> str:
        """Return the message of an error's body; foreign servers may have any shape."""
        try:
            return str(msgspec.json.decode(body)["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            text = body[:200].decode(errors="replace")
            return f"the server answered with status {status}: {text}"

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer."""
        assert self._session is not None
        request = {**self._model, **body, "stream": True}
        try:
            async with self._session.post(self._base / path, json=request) as response:
                if response.status != 200:
                    raise UserError(self.reason(await response.read(), response.status))
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue  # a blank line, a comment, or the end
                    chunk: dict[str, Any] = msgspec.json.decode(data)
                    if "error" in chunk:
                        raise UserError(chunk["error"]["message"])
                    yield chunk
        except (aiohttp.ClientError, ValueError) as error:
            raise UserError(f"{self._base}: {error}") from None


def _retry_seconds(header: str) -> float | None:
    """Return the seconds of a `Retry-After` (RFC 9110), a number or a date; None if neither."""
    if re.fullmatch("[0-9]{1,9}", header.strip()):
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    if until.tzinfo is None:  # "-0000": UTC, from a place that is not told
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
