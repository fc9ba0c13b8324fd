"""`LLM`: offline generation over a list of prompts, with vLLM's names."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tqdm import tqdm

from paged.models.tokenizer import Tokenizer
from paged.scheduler.admission import parse_cache_mode
from paged.scheduler.cache_events import CacheEvent
from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import load_engine
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.output import CompletionOutput, PositionLogprobs, RequestOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import CacheMode

type Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with "prompt" or "prompt_token_ids", and what else concerns it.

That is "cache_salt" (prompts share a prefix only under an equal salt), "cache" ("default",
"no_store" to leave nothing in the prefix cache, "pin" to keep the prompt there for a while) and
"priority" (lower is more urgent, under the priority policy).
"""

type Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with "role" and "content"."""


class LLM:
    """A model in this process.

        with LLM("path/to/model", max_model_len=2048) as llm:
            outputs = llm.generate(["The sky is"], SamplingParams(temperature=0))
            print(outputs[0].outputs[0].text)

    Args:
      model: local directory, GGUF file or Hub id; None is the demo model, SmolLM2-135M-Instruct.
      config: all settings at once, instead of `settings`.
      progress: show progress bars while loading.
      settings: fields of `EngineConfig` by name (`dtype`, `max_model_len`, `seed`, ...). Without
        `prefix_cache_policy` among them it is "lookahead": all prompts of a call are known.

    Raises:
      CheckpointError, UnsupportedModelError, CapacityError: see `load_engine`.
      TypeError: for an unknown setting.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise TypeError(f"Pass config or settings, not both (got {', '.join(settings)}).")
        if config is None:
            config = EngineConfig(**{"prefix_cache_policy": "lookahead", **settings})
        self._loaded = load_engine(model, config, progress=progress)
        self._engine = self._loaded.engine
        self._ids = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release parameters, KV cache and compiled programs."""
        self._engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        """Settings with every default resolved."""
        return self._loaded.config

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; return whether they were.

        Args:
          reset_running_requests: preempt what runs; between two calls of `generate` nothing does.
        """
        return self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def advance_weights_epoch(self) -> None:
        """Make all KV computed so far unreachable, because the weights have changed."""
        self._engine.advance_weights_epoch()

    def update_params(self, params: Any) -> None:
        """Generate with other parameters from now on; nothing is compiled.

        Cached prefixes are forgotten: they are those of the old parameters.

        Args:
          params: named, shaped and typed like those of `paged.models.load` with this engine's
            `dtype` and `quantization`. Arrays that lie on the engine's devices as they should are
            used as they are, without a copy: do not donate them to a later computation. The native
            CPU kernels have a layout of their own, so linear layers are copied there.

        Raises:
          ValueError: if names, shapes or dtypes differ; it lists them, and nothing has changed.
        """
        self._engine.update_params(params)

    def subscribe_cache_events(self, callback: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `callback` with every change of the prefix cache, from within `generate`.

        Returns: a function that ends the subscription.
        """
        return self._engine.scheduler.pool.events.subscribe(callback)

    def default_sampling_params(self) -> SamplingParams:
        """Return what `generate` uses when given none: the checkpoint's own sampling defaults."""
        if self.config.generation_config == "vllm":
            return SamplingParams()
        return SamplingParams(**self._loaded.checkpoint.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; all run as one continuous batch.

        Args:
          prompts: one prompt or several.
          sampling_params: one for all or one per prompt; None takes the checkpoint's defaults.
          use_tqdm: show a progress bar.
          lora_request: adapter to compute with, one for all or one per prompt; None is the base
            model. The engine needs `enable_lora`.
          priority: one per prompt, instead of those in the prompts; lower is more urgent. Counts
            under scheduling_policy="priority" only.

        Returns:
          One finished output per prompt, in order.

        Raises:
          ParameterError: for a prompt or parameters that cannot be served; nothing is generated.
          AdapterError: for an adapter that cannot be used; nothing is generated.
          ValueError: if there are not as many parameters, adapters or priorities as prompts.
        """
        several: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = self._params_for(len(several), sampling_params)
        parsed = [self._parse_prompt(prompt) for prompt in several]
        priorities = [p.priority for p in parsed] if priority is None else priority
        if len(priorities) != len(several):
            raise ValueError(f"Got {len(priorities)} priorities for {len(several)} prompts.")
        loras = _loras_for(len(several), lora_request)
        ids: list[str] = []
        try:
            for prompt, prompt_params, urgency, lora in zip(
                parsed, params, priorities, loras, strict=True
            ):
                request_id = str(next(self._ids))
                self._engine.add_request(
                    request_id,
                    prompt.token_ids,
                    prompt_params,
                    prompt=prompt.text,
                    cache_salt=prompt.cache_salt,
                    cache_mode=prompt.cache_mode,
                    priority=operator.index(urgency),
                    lora=lora,
                    stream=False,
                )
                ids.append(request_id)
            return self._run(ids, use_tqdm=use_tqdm)
        finally:
            self._engine.abort(ids)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or several.

        Args:
          messages: one conversation or a list of them.
          sampling_params, use_tqdm, lora_request, priority: as in `generate`.
          add_generation_prompt: open the assistant's turn.
          continue_final_message: continue the last message instead of answering it.
          tools: tool descriptions for the template.
          chat_template_kwargs: further variables of the template.

        Raises:
          ChatTemplateError: if the template refuses the conversation.
          ValueError: if the model has no chat template.
        """
        template = self._loaded.checkpoint.chat_template
        if template is None:
            raise ValueError(
                f"{self._loaded.checkpoint.name} has no chat template; use generate() instead."
            )
        conversations: list[Any]
        conversations = [messages] if _is_one_conversation(messages) else list(messages)
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            token_ids = self._engine.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
        )

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ValueError(f"Got {len(given)} sampling_params for {count} prompts.")
        return list(given)

    def _parse_prompt(self, prompt: Prompt) -> "_ParsedPrompt":
        if isinstance(prompt, str):
            return _ParsedPrompt(prompt, self._engine.tokenizer.encode(prompt))
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            token_ids = prompt.get("prompt_token_ids")
            if token_ids is None:
                if text is None:
                    raise ValueError('A prompt mapping needs "prompt" or "prompt_token_ids".')
                token_ids = self._engine.tokenizer.encode(text)
            return _ParsedPrompt(
                text,
                token_ids,
                cache_salt=prompt.get("cache_salt"),
                cache_mode=parse_cache_mode(prompt.get("cache")),
                priority=prompt.get("priority", 0),
            )
        return _ParsedPrompt(None, prompt)

    def _run(self, ids: Sequence[str], *, use_tqdm: bool) -> list[RequestOutput]:
        """Step until the given requests have ended; return their joined outputs."""
        joined = {request_id: _Joiner() for request_id in ids}
        remaining = set(ids)
        with tqdm(total=len(ids), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
            while remaining:
                outputs, _ = self._engine.step()
                for output in outputs:
                    joined[output.request_id].add(output)
                    if output.finished:
                        remaining.discard(output.request_id)
                        bar.update()
        return [joined[request_id].whole() for request_id in ids]


@dataclass(frozen=True, slots=True)
class _ParsedPrompt:
    """What is to be generated from, and how its prefix is treated; text where it was given so."""

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None
    cache_mode: CacheMode = CacheMode.DEFAULT
    priority: int = 0


class _Joiner:
    """Joins the deltas of one request."""

    def __init__(self) -> None:
        self._deltas: dict[int, list[CompletionOutput]] = {}
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self._last = output
        for delta in output.outputs:
            self._deltas.setdefault(delta.index, []).append(delta)

    def whole(self) -> RequestOutput:
        """Return the joined output."""
        assert self._last is not None
        outputs = tuple(_join(index, deltas) for index, deltas in sorted(self._deltas.items()))
        return RequestOutput(
            request_id=self._last.request_id,
            prompt=self._last.prompt,
            prompt_token_ids=self._last.prompt_token_ids,
            outputs=outputs,
            finished=self._last.finished,
            num_cached_tokens=self._last.num_cached_tokens,
            prompt_logprobs=self._last.prompt_logprobs,
        )


def _join(index: int, deltas: Sequence[CompletionOutput]) -> CompletionOutput:
    logprobs: tuple[PositionLogprobs, ...] | None = None
    cumulative: float | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(p for delta in deltas for p in delta.logprobs or ())
        # The sampled token comes first in every position.
        cumulative = sum(next(iter(position.values())).logprob for position in logprobs)
    return CompletionOutput(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=logprobs,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        cumulative_logprob=cumulative,
    )


def _loras_for(
    count: int, given: LoRARequest | Sequence[LoRARequest | None] | None
) -> list[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"Got {len(given)} lora_requests for {count} prompts.")
    return list(given)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def _is_one_conversation(messages: Any) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)
