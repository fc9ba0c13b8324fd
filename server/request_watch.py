"""`RequestWatch`: brings what the engine reports about a request's end to who wants to know."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from paged.scheduler.output import FinishedRequestStats, RequestOutput, StepStats
from paged.scheduler.params import SamplingParams

# An aborted request is reported with the next step; one that was never queued, not at all.
_ABORT_GRACE_SECONDS = 10.0


class Watcher(Protocol):
    """Somebody who wants to know how one request went."""

    def end(self, samples: list[FinishedRequestStats], error: Exception | None) -> None:
        """Take the records of the samples that have ended, and what ended the rest.

        Called once, on the event loop.
        """
        ...


type StartWatching = Callable[[str, SamplingParams, str], Watcher | None]
"""Called with id, parameters and model of a request as it begins; None if nobody is interested."""


@dataclass(slots=True, eq=False)
class _Watched:
    watchers: list[Watcher]
    num_samples: int
    samples: list[FinishedRequestStats]
    is_over: bool = False
    timer: asyncio.TimerHandle | None = None


class RequestWatch:
    """Follows the requests that somebody is interested in; all others pass by untouched.

    Args:
      abort_grace_seconds: how long the records of a request are waited for whose client has gone.
    """

    def __init__(self, *, abort_grace_seconds: float = _ABORT_GRACE_SECONDS) -> None:
        self._abort_grace_seconds = abort_grace_seconds
        self._starters: list[StartWatching] = []
        self._watched: dict[str, _Watched] = {}

    def add(self, start: StartWatching) -> None:
        """Ask `start` about every request from now on."""
        self._starters.append(start)

    def observe(self, stats: StepStats) -> None:
        """Take the records of one engine step."""
        if not self._watched:
            return
        for record in stats.finished:
            watched = self._watched.get(record.request_id)
            if watched is not None:
                watched.samples.append(record)
                if watched.is_over and len(watched.samples) == watched.num_samples:
                    self._end(record.request_id, None)

    def follow(
        self,
        request_id: str,
        params: SamplingParams,
        outputs: AsyncGenerator[RequestOutput],
        *,
        model: str,
    ) -> AsyncGenerator[RequestOutput]:
        """Return `outputs`, watched if somebody is interested."""
        if not self._starters:
            return outputs
        started = (start(request_id, params, model) for start in self._starters)
        watchers = [watcher for watcher in started if watcher is not None]
        if not watchers:
            return outputs
        return self._followed(request_id, _Watched(watchers, params.n, []), outputs)

    def close(self) -> None:
        """End what is still waited for."""
        for request_id in list(self._watched):
            self._end(request_id, None)

    async def _followed(
        self, request_id: str, watched: _Watched, outputs: AsyncGenerator[RequestOutput]
    ) -> AsyncGenerator[RequestOutput]:
        self._watched[request_id] = watched
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        except Exception as error:
            self._end(request_id, error)
            raise
        finally:
            self._leave(request_id, watched)

    def _leave(self, request_id: str, watched: _Watched) -> None:
        """End a request that nobody reads any more, now or when its records are there."""
        if request_id not in self._watched:
            return
        watched.is_over = True
        if len(watched.samples) == watched.num_samples:
            self._end(request_id, None)
        else:
            watched.timer = asyncio.get_running_loop().call_later(
                self._abort_grace_seconds, self._end, request_id, None
            )

    def _end(self, request_id: str, error: Exception | None) -> None:
        watched = self._watched.pop(request_id)
        if watched.timer is not None:
            watched.timer.cancel()
        for watcher in watched.watchers:
            watcher.end(watched.samples, error)
