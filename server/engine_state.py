"""GET /engine/state: blocks and requests of the engine, for the playground's live view.

Costs nothing while nobody asks: there is no counter of its own here, and no task.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from paged.scheduler.snapshot import EngineSnapshot, RequestSnapshot, block_cells
from paged.server.answer_bodies import Answer
from paged.server.auth import TENANT
from paged.server.context import CONTEXT
from paged.server.errors import json_response
from paged.server.metrics import EngineMetrics

if TYPE_CHECKING:
    from paged.scheduler.async_engine import AsyncEngine

MAX_CELLS = 4096
"""Most cells that the pool is described by; larger pools have several blocks per cell."""

_MIN_INTERVAL_SECONDS = 0.2


class BlockStates(Answer):
    """The KV blocks: how many are in which state, and cell by cell (see `BlockCells`)."""

    block_size: int
    total: int
    free: int
    cached: int
    used: int
    shared: int
    blocks_per_cell: int
    cells_held: list[int]
    cells_cached: list[int]
    cells_holders: list[int]


class RequestState(Answer):
    """Where one sample stands; lengths in tokens, `blocks` in KV blocks."""

    id: str
    state: str
    prompt: int
    computed: int
    total: int
    limit: int
    cached: int
    blocks: int
    preemptions: int


class Totals(Answer):
    """Counts since the start, as in /metrics."""

    generation_tokens: int
    prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int


class EngineState(Answer):
    """Answer of GET /engine/state; `time` is in seconds since some moment in the past."""

    time: float
    running: int
    waiting: int
    totals: Totals
    blocks: BlockStates
    requests: list[RequestState]


class _View:
    """A snapshot, its blocks summed up; the copies of the pool are not kept."""

    def __init__(self, snapshot: EngineSnapshot, taken: float) -> None:
        cells = block_cells(snapshot, MAX_CELLS)
        self.taken = taken
        self.running, self.waiting = snapshot.num_running, snapshot.num_waiting
        self.requests = snapshot.requests
        self.blocks = BlockStates(
            block_size=snapshot.block_size,
            total=len(snapshot.ref_counts) - 1,
            free=cells.num_free,
            cached=cells.num_cached,
            used=cells.num_used,
            shared=cells.num_shared,
            blocks_per_cell=cells.blocks_per_cell,
            cells_held=cells.held,
            cells_cached=cells.cached,
            cells_holders=cells.holders,
        )


class EngineWatch:
    """Takes snapshots for all who look: one at a time, and not too often.

    Args:
      engine: is asked between two of its steps.
      min_interval_seconds: who looks sooner gets the snapshot that there is.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: "AsyncEngine",
        *,
        min_interval_seconds: float = _MIN_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._min_interval_seconds = min_interval_seconds
        self._clock = clock
        self._started = -math.inf
        self._taking: asyncio.Task[_View] | None = None

    async def look(self) -> _View:
        """Return a snapshot that is about as young as the interval is long.

        Raises: EngineDeadError.
        """
        if self._taking is None or (
            self._taking.done() and self._clock() - self._started >= self._min_interval_seconds
        ):
            self._started = self._clock()
            self._taking = asyncio.create_task(self._take())
        # One who goes away must not take it from the others.
        return await asyncio.shield(self._taking)

    async def _take(self) -> _View:
        snapshot = await self._engine.snapshot()
        return await asyncio.to_thread(_View, snapshot, self._clock())


ENGINE_WATCH = web.AppKey("engine_watch", EngineWatch)


async def show_engine_state(request: web.Request) -> web.Response:
    """Return what the engine holds: KV blocks by state, requests, totals.

    Where keys stand for tenants, each sees its own requests only.
    """
    context = request.app[CONTEXT]
    view = await request.app[ENGINE_WATCH].look()
    requests: Sequence[RequestSnapshot] = view.requests
    if context.settings.salts_by_key:
        own = f"{request[TENANT]}/"
        requests = [r for r in requests if (r.cache_salt or "").startswith(own)]
    state = EngineState(
        time=view.taken,
        running=view.running,
        waiting=view.waiting,
        totals=_totals(context.metrics),
        blocks=view.blocks,
        requests=[_request_state(request) for request in requests],
    )
    response = json_response(state)
    response.headers["Cache-Control"] = "no-store"
    return response


def _totals(metrics: EngineMetrics) -> Totals:
    values = metrics.totals(
        "generation_tokens",
        "prompt_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
    )
    return Totals(*map(int, values))


def _request_state(request: RequestSnapshot) -> RequestState:
    return RequestState(
        id=_short_id(request),
        state=request.status,
        prompt=request.num_prompt_tokens,
        computed=request.num_computed_tokens,
        total=request.num_tokens,
        limit=request.max_num_tokens,
        cached=request.num_cached_tokens,
        blocks=request.num_blocks,
        preemptions=request.num_preemptions,
    )


def _short_id(request: RequestSnapshot) -> str:
    """Return the end of an id, which is random: clients choose the rest, which may be long."""
    tail = request.request_id[-8:]
    return tail if request.num_samples == 1 else f"{tail}.{request.index}"
