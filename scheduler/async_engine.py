"""`AsyncEngine`: what an event loop may ask of an engine that steps on a thread of its own.

The event loop never waits for a step: requests go in through a queue, and each step's outputs
come back in one hand-over (docs/decisions/0008).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from paged.models.checkpoint import Checkpoint
from paged.models.tokenizer import Tokenizer
from paged.scheduler.cache_events import CacheEvent
from paged.scheduler.config import EngineConfig, StepLimits
from paged.scheduler.deltas import Delta, join
from paged.scheduler.engine import Engine
from paged.scheduler.engine_thread import EngineThread, LoopSide
from paged.scheduler.errors import EngineDeadError, QueueFullError
from paged.scheduler.loading import LoadedEngine, load_engine
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.mailroom import Mailroom
from paged.scheduler.output import RequestOutput, StepStats
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import CacheMode
from paged.scheduler.snapshot import EngineSnapshot
from paged.scheduler.startup import Phase
from paged.scheduler.tiers.figures import TierStats
from paged.scheduler.weight_update import IN_FLIGHT, InFlight

logger = logging.getLogger(__name__)

# A step of a large model on a slow CPU may take tens of seconds; one that takes longer is stuck.
_STALL_SECONDS = 300.0

# Tokens: what a socket holds before a slow reader is felt here is several thousand more.
_MAX_BACKLOG = 8192


class AsyncEngine:
    """Serves many concurrent callers from one engine thread.

    Args:
      loaded: an engine and what it was loaded from.
      stall_seconds: time without progress after which `check_health` gives the engine up.
      max_backlog: most deltas that wait for a consumer; a request with more is ended.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        *,
        stall_seconds: float = _STALL_SECONDS,
        max_backlog: int = _MAX_BACKLOG,
    ) -> None:
        self._loaded = loaded
        self._engine: Engine = loaded.engine
        self._mailroom = Mailroom(max_backlog, self.abort)
        loop_side = LoopSide(self._deliver, self._mailroom.refuse, self._mailroom.wake_everyone)
        self._thread = EngineThread(self._engine, loop_side, stall_seconds)
        self._listeners: list[Callable[[StepStats], None]] = []
        self._draining = False
        self._last_stats = StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0)

    @classmethod
    async def create(
        cls, model: str | None = None, config: EngineConfig | None = None, *, progress: bool = True
    ) -> "AsyncEngine":
        """Load a model, compile its steps and start the engine thread.

        Args:
          model: local directory, GGUF file or Hub id; None is the demo model.
          config: settings; None takes the defaults.
          progress: show progress bars.

        Raises:
          CheckpointError, UnsupportedModelError, CapacityError: each with what to do about it.
        """
        loaded = await asyncio.to_thread(
            load_engine, model, config or EngineConfig(), progress=progress
        )
        engine = cls(loaded)
        engine.start()
        return engine

    @property
    def config(self) -> EngineConfig:
        """Settings with every default resolved."""
        return self._loaded.config

    @property
    def checkpoint(self) -> Checkpoint:
        """What the model was loaded from."""
        return self._loaded.checkpoint

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        """Name of the model as given."""
        return self._loaded.checkpoint.name

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self._loaded.max_model_len

    @property
    def cache_info(self) -> Mapping[str, str]:
        """Settings of the KV cache as text, for a metric's labels."""
        return self._loaded.cache_info

    @property
    def startup_phases(self) -> Sequence[Phase]:
        """How long each phase of loading took."""
        return self._loaded.startup_phases

    @property
    def num_unfinished(self) -> int:
        """Requests whose outputs are not all delivered."""
        return len(self._mailroom)

    def tier_stats(self) -> TierStats | None:
        """Return figures of the memory below the device, None if there is none."""
        return self._engine.tier_stats()

    def start(self) -> None:
        """Start the engine thread; call on the event loop that will consume the outputs."""
        self._thread.start()

    def add_stats_listener(self, callback: Callable[[StepStats], None]) -> None:
        """Call `callback` on the event loop with the figures of every step."""
        self._listeners.append(callback)

    def subscribe_cache_events(self, callback: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `callback` on the event loop with every change of the prefix cache.

        It hears of all that requests made after this call bring about, in order. What it raises
        is logged.

        Returns: a function that ends the subscription.
        """
        return self._thread.cache_events.subscribe(callback)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, between two steps.

        Args:
          reset_running_requests: preempt what runs, to be computed again; otherwise nothing is
            forgotten while some request holds blocks.

        Returns: whether they were forgotten.
        Raises: EngineDeadError.
        """
        return await self._thread.between_steps(
            lambda: self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests)
        )

    async def snapshot(self) -> EngineSnapshot:
        """Return what the engine holds between two steps.

        Raises: EngineDeadError.
        """
        return await self._thread.between_steps(self._engine.snapshot)

    async def advance_weights_epoch(self) -> None:
        """Make all KV computed so far unreachable, because the weights have changed.

        Running requests keep what they have generated, and go on with the new weights.

        Raises: EngineDeadError.
        """
        await self._thread.between_steps(self._engine.advance_weights_epoch)

    async def update_params(self, params: Any, *, in_flight: InFlight = "keep") -> None:
        """Compute with other parameters, from some step on; nothing is compiled.

        Cached prefixes are forgotten.

        Args:
          params: see `LLM.update_params`.
          in_flight: what becomes of unfinished requests, see `InFlight`.

        Raises:
          ValueError: if the parameters do not fit, and nothing has changed but what `in_flight`
            says; or if `in_flight` is unknown, or "wait" while another update waits.
          EngineDeadError: at any time.
        """
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight={in_flight!r} is unknown; choose {', '.join(IN_FLIGHT)}.")
        await self._thread.update_params(params, in_flight)

    async def add_lora(self, lora: LoRARequest) -> None:
        """Read an adapter's files, even if they have been read, and list it by its name.

        Requests that have begun go on with what was under the name before.

        Raises:
          AdapterNotFoundError, AdapterMismatchError, UnsupportedAdapterError: if there is no such
            adapter, it is one of another model, or it needs what is not implemented or has no room;
            nothing has changed then.
          ParameterError: if the engine takes no adapters.
        """
        await asyncio.to_thread(self._engine.lora_store(lora).add, lora)

    def remove_lora(self, name: str) -> bool:
        """Take an adapter off the list; its unfinished requests go on. Say whether it was there."""
        return self._engine.loras is not None and self._engine.loras.remove(name)

    def loras(self) -> list[LoRARequest]:
        """Return the adapters that were added, in order."""
        return [] if self._engine.loras is None else self._engine.loras.listed()

    async def measure_work(self) -> None:
        """From now on note, for every request, the time of work that it took part in.

        Raises: EngineDeadError.
        """
        await self._thread.between_steps(self._engine.measure_work)

    async def start_profile(self, directory: str, num_steps: int | None = None) -> None:
        """Start a trace of this process by JAX's profiler; see `StepProfiler.start`."""
        await asyncio.to_thread(self._thread.profiler.start, directory, num_steps)

    async def stop_profile(self) -> None:
        """Stop the trace and wait until it is written; see `StepProfiler.stop`."""
        await asyncio.to_thread(self._thread.profiler.stop)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        cache_salt: str | None = None,
        cache_mode: CacheMode = CacheMode.DEFAULT,
        priority: int = 0,
        lora: LoRARequest | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield deltas of one request as its samples advance; ends when all have finished.

        An output has what has come since the one before: of one step or, if the caller was busy
        meanwhile, of several.

        Closing the iterator, or cancelling the task that consumes it, aborts the request.

        Args:
          prompt_token_ids: ids of the prompt.
          params: sampling parameters.
          request_id: unique among unfinished requests; made up if None.
          prompt: the prompt's text, handed back in the outputs.
          cache_salt: prefix-cache isolation.
          cache_mode: what the request leaves behind in the prefix cache.
          priority: lower is more urgent; counts under the priority policy only.
          lora: adapter to compute with; it need not have been added.
          stream: yield tokens as they come; otherwise each sample's all at once when it ends.

        Raises:
          ParameterError: before the first item, for what cannot be served.
          QueueFullError: before the first item, when too many requests wait, or grammars.
          AdapterError: before the first item, if the adapter cannot be used.
          SlowConsumerError: at any time, if the caller takes what has come too slowly.
          EngineDeadError: at any time.
        """
        self._check_accepting(params.n)
        request_id = request_id or uuid.uuid4().hex
        arrival_time = time.monotonic()
        mailbox = self._mailroom.open(request_id, params.n)
        finished = False
        try:
            requests = self._engine.processor.process(
                request_id,
                prompt_token_ids,
                params,
                cache_salt=cache_salt,
                cache_mode=cache_mode,
                priority=priority,
                arrival_time=arrival_time,
                grammar=await self._engine.compile_grammar(params),
                adapter=await self._engine.load_adapter(lora),
            )
            self._thread.add(requests, prompt, stream=stream)
            if mailbox.is_aborted:  # while its grammar was compiled, or its adapter read
                self.abort(request_id)
            while not finished:
                if mailbox.deltas:
                    deltas, mailbox.deltas = mailbox.deltas, []
                    finished = deltas[-1].finished
                    yield join(deltas)
                elif mailbox.error is not None:
                    raise mailbox.error
                elif self._thread.has_failed:
                    raise self._thread.death()
                else:
                    await mailbox.arrival()
        finally:
            self._mailroom.close(request_id)
            if not finished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request by id and free its blocks within one step; unknown ids are ignored."""
        mailbox = self._mailroom.get(request_id)
        if mailbox is not None:
            mailbox.is_aborted = True
        self._thread.abort(request_id)

    def check_health(self) -> None:
        """Check that the step loop lives and moves.

        Raises:
          EngineDeadError: if it died, was shut down, or one step takes longer than
            `stall_seconds`.
        """
        self._thread.check()

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests and wait until the present ones end, at most `timeout_seconds`."""
        self._draining = True
        try:
            await asyncio.wait_for(self._mailroom.idle.wait(), timeout_seconds)
        except TimeoutError:
            logger.warning(
                "Stopping with %d unfinished requests after %.0f s of draining.",
                len(self._mailroom),
                timeout_seconds,
            )

    async def shutdown(self) -> None:
        """Abort what is left, stop the thread and release the device's memory."""
        await self._thread.stop()

    def _check_accepting(self, num_new: int) -> None:
        self.check_health()
        if self._draining:
            raise EngineDeadError("The engine is shutting down and takes no new requests.")
        limit = self.config.max_num_queued_reqs
        if limit is None:
            return
        # What arrived since the last step has not been admitted yet; unless that step already
        # left somebody waiting, it will run as far as there are sequences.
        can_run = self._last_stats.num_running
        if not self._last_stats.num_waiting:
            can_run = StepLimits.of(self.config).max_num_seqs
        present = self._mailroom.num_samples
        if present + num_new > can_run + limit:
            raise QueueFullError(
                f"{max(present - can_run, 0)} requests are waiting and "
                f"max_num_queued_reqs={limit}; try again later."
            )

    def _deliver(self, deltas: list[Delta], stats: StepStats) -> None:
        """Sort a step's deltas into mailboxes."""
        self._last_stats = stats
        self._mailroom.deliver(deltas)
        for listener in self._listeners:
            listener(stats)
