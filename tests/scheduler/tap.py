"""`Tap`: a fake model whose tokens come when a test lets them, so that it acts in mid-request."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from paged.scheduler.request import Request


class Tap:
    """A script for `FakeRunner` that says "a"; the engine stands in a step until a token may come.

    However busy the machine is, a request is then where the test wants it.

    Args:
      num_tokens: how many come at once.
    """

    def __init__(self, num_tokens: int = 1) -> None:
        self._permits = threading.Semaphore(num_tokens)
        self._is_open = False

    def __call__(self, request: Request) -> int:
        if not self._is_open:
            assert self._permits.acquire(timeout=300), "the test has let no more tokens come"
        return ord("a")

    def let(self, num_tokens: int = 1) -> None:
        """Let some more come."""
        self._permits.release(num_tokens)

    def open(self) -> None:
        """Let all come from now on."""
        self._is_open = True
        self._permits.release(1000)  # for who waits already

    async def open_after[T](self, call: Coroutine[Any, Any, T]) -> T:
        """Have something queued that the engine does between two steps, then open; its result."""
        doing = asyncio.create_task(call)
        await asyncio.sleep(0)  # the engine's inbox has it
        self.open()
        return await doing
