"""`FakeEngine`: the engine as the server sees it, with scripted tokens instead of a model.

The tokenizer is the tiny byte-level one: token ids are bytes, but for <pad>, <bos> and <eos>.
"""

import asyncio
import codecs
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged.models.chat_template import ChatTemplate
from paged.models.config import ModelConfig
from paged.models.tokenizer import Tokenizer
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import EngineDeadError
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.output import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    StepStats,
)
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import CacheMode
from paged.scheduler.snapshot import EngineSnapshot
from paged.scheduler.text_decoder import TextDecoder
from paged.scheduler.tiers.figures import TierStats

TOKENIZER_DIR = pathlib.Path(__file__).parents[1] / "data" / "golden" / "tiny" / "tokenizer"
EOS = 2
VOCAB_SIZE = 256


EMPTY = EngineSnapshot(
    block_size=16, ref_counts=[0] * 65, keys=[None] * 65, num_running=0, num_waiting=0, requests=()
)


@dataclass(frozen=True)
class Seen:
    """One call of `generate`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None
    cache_salt: str | None
    cache_mode: CacheMode = CacheMode.DEFAULT
    priority: int = 0
    stream: bool = True
    lora: LoRARequest | None = None


@dataclass
class FakeCheckpoint:
    """What the server reads of a checkpoint."""

    model_config: ModelConfig
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    pooling_modes: frozenset[str] = frozenset()


@dataclass
class FakeEngine:
    """Answers every prompt with `answer`, one byte per step, then <eos>.

    Attributes:
      answer: text, or a function of the sample's index.
      max_model_len: longest prompt plus output.
      chat_template: Jinja source; None takes the tiny tokenizer's, "" is a model without one.
      sampling_defaults: that the checkpoint recommends.
      config: settings.
      step_seconds: pause before each token.
      num_cached_tokens: reported for every prompt.
      refuse: raised by `generate` before the first item.
      fail_after: number of tokens after which `generate` raises EngineDeadError.
      has_vectors: whether requests for vectors get them before they end.
      health: raised by `check_health`.
      state, num_snapshots: what `snapshot` returns, and how often it was asked for.
      seen, aborted, drained, resets: what the server did; of a reset whether it was to preempt.
      tiers: figures of the memory below the device.
      profiles: what was asked of the profiler: (folder, steps) or "stopped".
      measures_work: whether that was asked for.
      adapters: what was added under which name, and not removed.
      refuse_adapter: raised by `add_lora`.
    """

    answer: str | Callable[[int], str] = "The answer is 42."
    max_model_len: int = 512
    chat_template: str | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=EngineConfig)
    step_seconds: float = 0.0
    num_cached_tokens: int = 0
    refuse: Exception | None = None
    fail_after: int | None = None
    last_finish_reason: str = "length"
    last_stop_reason: str | None = None
    has_vectors: bool = True
    health: Exception | None = None

    state: EngineSnapshot = EMPTY
    num_snapshots: int = 0
    tiers: TierStats | None = None

    model_name = "tiny"
    startup_phases = ()
    measures_work = False
    profiles: list[Any] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)
    resets: list[bool] = field(default_factory=list)

    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    refuse_adapter: Exception | None = None

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_directory(TOKENIZER_DIR)
        self.cache_info = {"block_size": "16", "num_gpu_blocks": "64"}
        self.checkpoint = FakeCheckpoint(
            model_config=_model_config(self.max_model_len),
            chat_template=self._template(),
            sampling_defaults=self.sampling_defaults,
        )
        self.running: dict[str, int] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._listeners: list[Callable[[StepStats], None]] = []

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    def add_stats_listener(self, callback: Callable[[StepStats], None]) -> None:
        self._listeners.append(callback)

    def tier_stats(self) -> TierStats | None:
        return self.tiers

    def emit(self, stats: StepStats) -> None:
        """Tell the listeners about a step."""
        for listener in self._listeners:
            listener(stats)

    def _emit_step(self, num_generation_tokens: int = 0) -> None:
        num_running = sum(self.running.values())
        self.emit(
            StepStats(
                num_running=num_running,
                num_waiting=0,
                kv_cache_usage=num_running / 100,
                num_generation_tokens=num_generation_tokens,
            )
        )

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        self.check_health()
        self.resets.append(reset_running_requests)
        return reset_running_requests or not self.running

    async def add_lora(self, lora: LoRARequest) -> None:
        await asyncio.sleep(0.01)
        if self.refuse_adapter is not None:
            raise self.refuse_adapter
        self.adapters[lora.lora_name] = lora

    def remove_lora(self, name: str) -> bool:
        return self.adapters.pop(name, None) is not None

    async def measure_work(self) -> None:
        self.measures_work = True

    async def start_profile(self, directory: str, num_steps: int | None = None) -> None:
        if self.profiles and self.profiles[-1] != "stopped":
            raise RuntimeError("A profile is being taken already; stop it first.")
        self.profiles.append((directory, num_steps))

    async def stop_profile(self) -> None:
        if not self.profiles or self.profiles[-1] == "stopped":
            raise RuntimeError("No profile is being taken; start one first.")
        self.profiles.append("stopped")

    async def snapshot(self) -> EngineSnapshot:
        self.check_health()
        self.num_snapshots += 1
        return self.state

    async def drain(self, timeout_seconds: float) -> None:
        self.drained.append(timeout_seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), timeout_seconds)

    async def shutdown(self) -> None:
        self.health = EngineDeadError("The engine was shut down.")

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        cache_salt: str | None = None,
        cache_mode: CacheMode = CacheMode.DEFAULT,
        priority: int = 0,
        lora: LoRARequest | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.refuse is not None:
            raise self.refuse
        assert request_id not in self.running, "ids must be unique"
        prompt_ids = tuple(prompt_token_ids)
        self.seen.append(
            Seen(
                *(request_id, prompt_ids, params, prompt, cache_salt, cache_mode, priority, stream),
                lora,
            )
        )
        self.running[request_id] = params.n
        self.idle.clear()
        finished = False
        try:
            samples = [self._sample(index, params) for index in range(params.n)]
            while not finished:
                await asyncio.sleep(self.step_seconds)
                if isinstance(self.health, EngineDeadError):
                    raise self.health
                for sample in [s for s in samples if not s.finish_reason]:
                    if len(sample.token_ids) == self.fail_after:
                        raise EngineDeadError("The engine has failed: scripted.")
                    delta = sample.step() if stream else sample.add_step()
                    has_vector = self.has_vectors and params.is_pooled
                    finished = all(s.finish_reason for s in samples)
                    self._emit_step(num_generation_tokens=1)
                    if not (stream or delta.finish_reason):
                        continue
                    yield RequestOutput(
                        request_id=request_id,
                        prompt=prompt,
                        prompt_token_ids=prompt_ids,
                        outputs=(delta,),
                        finished=finished,
                        num_cached_tokens=self.num_cached_tokens,
                        pooled=pooled_row(prompt_ids) if has_vector and finished else None,
                        prompt_logprobs=self._prompt_logprobs(prompt_ids, params),
                    )
        finally:
            del self.running[request_id]
            if not self.running:
                self.idle.set()
            if not finished:
                self.aborted.append(request_id)
            self._emit_step()

    def _sample(self, index: int, params: SamplingParams) -> "_Sample":
        answer = self.answer if isinstance(self.answer, str) else self.answer(index)
        last = self.last_finish_reason, self.last_stop_reason
        return _Sample(index, answer.encode(), params, self.tokenizer, last)

    def _prompt_logprobs(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[PositionLogprobs | None] | None:
        if params.prompt_logprobs is None:
            return None
        decoder = TextDecoder(self.tokenizer, (), skip_special_tokens=False)
        positions: list[PositionLogprobs | None] = []
        for token_id in prompt_ids:
            position = {token_id: Logprob(-0.5, 1, decoder.step(token_id))}
            if params.prompt_logprobs:
                other = (token_id + 2) % VOCAB_SIZE
                position[other] = Logprob(-1.0, 2, self.tokenizer.token_text(other))
            positions.append(position if positions else None)
        return positions

    def _template(self) -> ChatTemplate | None:
        source = self.tokenizer.chat_template if self.chat_template is None else self.chat_template
        if not source:
            return None
        return ChatTemplate(source, self.tokenizer.bos_token, self.tokenizer.eos_token)


def pooled_row(prompt_ids: Sequence[int]) -> np.ndarray:
    """Return the vector that the engine makes of a prompt: 3 and 4 where its last token says."""
    row = np.zeros(8, np.float32)
    row[[prompt_ids[-1] % 8, (prompt_ids[-1] + 1) % 8]] = 3, 4
    return row


class _Sample:
    """One sample on its way: bytes in, deltas out, stop strings held back as the engine does."""

    def __init__(
        self,
        index: int,
        answer: bytes,
        params: SamplingParams,
        tokenizer: Tokenizer,
        last: tuple[str, str | None],
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._answer = answer
        self._params = params
        self._tokenizer = tokenizer
        self._last = last
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._num_sent = 0
        self._whole: CompletionOutput | None = None

    def step(self) -> CompletionOutput:
        position = len(self.token_ids)
        is_over = position >= len(self._answer) and not self._params.ignore_eos
        token_id = EOS if is_over else self._answer[position % len(self._answer)]
        self.token_ids.append(token_id)
        stop_reason: str | int | None = None
        piece = ""
        if token_id == EOS:
            self.finish_reason = "stop"
        elif token_id in (self._params.stop_token_ids or ()):
            self.finish_reason, stop_reason = "stop", token_id
        else:
            piece = self._decoder.decode(bytes([token_id]))
            self._text += piece
            stop_reason = self._cut_at_stop_string()
        if self.finish_reason is None and len(self.token_ids) == self._params.max_tokens:
            self.finish_reason, stop_reason = self._last
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = (self._position(token_id, piece or self._special(token_id)),)
        return CompletionOutput(
            index=self.index,
            text=self._take_text(),
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
        )

    def add_step(self) -> CompletionOutput:
        """Return all of the sample so far."""
        delta = self.step()
        self._whole = delta if self._whole is None else _joined(self._whole, delta)
        return self._whole

    def _special(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if token_id == EOS else ""

    def _cut_at_stop_string(self) -> str | None:
        for stop in self._params.stop_strings:
            if stop in self._text:
                end = self._text.index(stop)
                if self._params.include_stop_str_in_output:
                    end += len(stop)
                self._text = self._text[:end]
                self.finish_reason = "stop"
                return stop
        return None

    def _take_text(self) -> str:
        held_back = max((len(s) - 1 for s in self._params.stop_strings), default=0)
        end = len(self._text) if self.finish_reason else max(0, len(self._text) - held_back)
        text = self._text[self._num_sent : end]
        self._num_sent = max(end, self._num_sent)
        return text

    def _position(self, token_id: int, piece: str) -> dict[int, Logprob]:
        position = {token_id: Logprob(-0.25, 1, piece)}
        for rank in range(2, (self._params.logprobs or 0) + 1):
            other = (token_id + rank) % VOCAB_SIZE
            position[other] = Logprob(-float(rank), rank, self._tokenizer.token_text(other))
        return position


def _joined(before: CompletionOutput, delta: CompletionOutput) -> CompletionOutput:
    has_logprobs = before.logprobs is not None and delta.logprobs is not None
    return dataclasses.replace(
        delta,
        text=before.text + delta.text,
        token_ids=(*before.token_ids, *delta.token_ids),
        logprobs=(*before.logprobs, *delta.logprobs) if has_logprobs else None,
    )


def _model_config(max_model_len: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=max_model_len,
        rms_norm_eps=1e-5,
    )
