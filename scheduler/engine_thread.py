"""`EngineThread`: an `Engine` that steps on a thread of its own while it has requests.

What an event loop wants of it comes in as commands, which run between two steps; what a step
brings goes out to the loop in one hand-over (docs/decisions/0008).
"""

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paged.profiler import StepProfiler
from paged.scheduler.cache_event_relay import CacheEventRelay
from paged.scheduler.deltas import Delta
from paged.scheduler.engine import Engine
from paged.scheduler.errors import EngineDeadError
from paged.scheduler.output import FinishReason, StepStats
from paged.scheduler.request import Request
from paged.scheduler.weight_update import InFlight, WeightUpdates

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopSide:
    """What the thread calls on the event loop.

    Attributes:
      deliver: with the deltas and the figures of a step.
      refuse: with the id of a request that the engine did not take, and why.
      wake_everyone: when the engine is gone.
    """

    deliver: Callable[[list[Delta], StepStats], None]
    refuse: Callable[[str, Exception], None]
    wake_everyone: Callable[[], None]


class EngineThread:
    """Steps an engine; its methods are for the event loop, but for the last ones.

    Args:
      engine: what steps; only this thread touches its scheduler once it has started.
      loop_side: where results go.
      stall_seconds: time without progress after which `check` gives the engine up.

    Attributes:
      cache_events: changes of the prefix cache, for who subscribes.
      profiler: traces steps while it is asked to.
      step_started: when the step that runs began, `time.monotonic`; None between two.
    """

    def __init__(self, engine: Engine, loop_side: LoopSide, stall_seconds: float) -> None:
        self._engine = engine
        self._loop_side = loop_side
        self._stall_seconds = stall_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: set[asyncio.Future[Any]] = set()
        self._updates = WeightUpdates(self._update_now, self._abort_all)
        self.cache_events = CacheEventRelay(
            engine.scheduler.pool.events, on_engine=self._inbox.put, on_loop=self._call_loop
        )
        self.profiler = StepProfiler()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self.step_started: float | None = None

    def start(self) -> None:
        """Start the thread; results go to the event loop that runs now."""
        if self._thread is not None:
            raise RuntimeError("The engine is already started.")
        self._loop = asyncio.get_running_loop()
        self._engine.prepare_grammars()
        self._thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether the engine is gone: its thread failed, or was stopped."""
        return self._failure is not None

    def death(self) -> EngineDeadError:
        """Return the error that says why the engine is gone."""
        if isinstance(self._failure, EngineDeadError):
            return self._failure
        return EngineDeadError(f"The engine has failed: {self._failure!r}.")

    def check(self) -> None:
        """Check that the steps go on.

        Raises:
          EngineDeadError: if the thread died or was stopped, or one step takes longer than
            `stall_seconds`.
        """
        if self._failure is not None:
            raise self.death()
        if self._thread is None or not self._thread.is_alive() or self._stopping:
            raise EngineDeadError("The engine is not running.")
        started = self.step_started
        if started is not None and time.monotonic() - started > self._stall_seconds:
            raise EngineDeadError(
                f"The engine has been in one step for more than {self._stall_seconds:.0f} seconds."
            )

    def add(self, requests: Sequence[Request], prompt: str | None, *, stream: bool) -> None:
        """Queue the samples of one request; see `Engine.add_processed`."""
        self._inbox.put(lambda: self._add(requests, prompt, stream))

    def abort(self, request_id: str) -> None:
        """End a request, if it is there, before the next step."""
        self._inbox.put(lambda: self._abort(request_id))

    async def between_steps[T](self, function: Callable[[], T]) -> T:
        """Run a function on the thread between two steps and return its result.

        Raises: EngineDeadError.
        """
        self.check()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._answered(answer, lambda: self._answer(answer, function))

    async def update_params(self, params: Any, in_flight: InFlight) -> None:
        """Compute with other parameters; see `AsyncEngine.update_params`."""
        self.check()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        update = functools.partial(
            self._updates.update, params, in_flight, lambda why: self._resolve(answer, why)
        )
        await self._answered(answer, update)

    async def stop(self) -> None:
        """Stop the thread, which closes the engine, and let everyone know who waits."""
        if self._thread is None or self._stopping:
            return
        self._stopping = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        if self._failure is None:
            self._failure = EngineDeadError("The engine was shut down.")
        self._wake_everyone()

    async def _answered[T](self, answer: asyncio.Future[T], command: Callable[[], None]) -> T:
        self._answers.add(answer)
        self._inbox.put(command)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def _wake_everyone(self) -> None:
        self._loop_side.wake_everyone()
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(self.death())

    # Below this line everything runs on the thread.

    def _run(self) -> None:
        try:
            while True:
                self._take_inbox()
                if self._stopping:
                    return
                if not self._engine.has_unfinished:
                    self._updates.apply_waiting()
                    continue
                self.step_started = time.monotonic()
                deltas, stats = self._engine.step_deltas()
                self.step_started = None
                if self.profiler.is_running:
                    self.profiler.on_step()
                self.cache_events.hand_over()
                self._hand_over(deltas, stats)
        except BaseException as error:  # anything at all: no request may wait forever
            logger.exception("The engine thread failed.")
            self._failure = error
            self._count_failed_requests()
        finally:
            self._engine.close()
            if self._failure is not None:
                self._call_loop(self._wake_everyone)

    def _count_failed_requests(self) -> None:
        """Let the metrics know of the requests that end with the engine; callers get the error."""
        try:
            self._engine.abort_all_deltas(FinishReason.ERROR)
            stats = self._engine.take_stats()
        except Exception:  # it may have failed in the midst of anything
            logger.debug("Requests could not be ended one by one.", exc_info=True)
            return
        self._hand_over([], stats)

    def _take_inbox(self) -> None:
        """Run the queued commands; wait for one if there is nothing else to do."""
        if not self._engine.has_unfinished and not self._updates.is_waiting:
            self._inbox.get()()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, requests: Sequence[Request], prompt: str | None, stream: bool) -> None:
        add = functools.partial(self._add_now, requests, prompt, stream)
        self._updates.add(requests[0].parent_id, add)

    def _add_now(self, requests: Sequence[Request], prompt: str | None, stream: bool) -> None:
        try:
            self._engine.add_processed(requests, prompt, stream=stream)
        except ValueError as error:  # this request's fault alone: the others go on
            refuse = functools.partial(self._loop_side.refuse, requests[0].parent_id, error)
            self._call_loop(refuse)

    def _answer[T](self, answer: asyncio.Future[T], function: Callable[[], T]) -> None:
        """Run a caller's function; one that fails leaves the engine in no state to go on."""
        result = function()
        self.cache_events.hand_over()
        self._call_loop(lambda: None if answer.done() else answer.set_result(result))

    def _update_now(self, params: Any) -> None:
        try:
            self._engine.update_params(params)
        finally:
            self.cache_events.hand_over()

    def _abort_all(self) -> None:
        self._hand_over(self._engine.abort_all_deltas(), self._engine.take_stats())

    def _resolve(self, answer: asyncio.Future[None], error: Exception | None) -> None:
        def resolve() -> None:  # on the event loop
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        self._call_loop(resolve)

    def _abort(self, request_id: str) -> None:
        self._updates.let_go(request_id)
        deltas = self._engine.abort_deltas([request_id])
        if deltas:
            self._hand_over(deltas, self._engine.take_stats())

    def _hand_over(self, deltas: list[Delta], stats: StepStats) -> None:
        self._call_loop(lambda: self._loop_side.deliver(deltas, stats))

    def _call_loop(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
