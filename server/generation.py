"""One HTTP request's run through the engine: several prompts, one stream of outputs, one usage."""

import asyncio
import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from paged.scheduler.errors import QueueFullError
from paged.scheduler.output import CompletionOutput, PositionLogprobs, RequestOutput
from paged.scheduler.params import SamplingParams
from paged.server.context import ServerContext
from paged.server.errors import ApiError
from paged.server.handling import Handling
from paged.server.prompts import Prompt
from paged.server.protocol import GenerationRequest
from paged.server.request_log import log_request
from paged.server.served_models import ServedModel
from paged.server.stream_interval import in_intervals

type Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Deltas of several prompts as they come: (index of the prompt, output)."""

type PromptPositions = Sequence[PositionLogprobs | None]
"""Log probabilities of a prompt by position."""


class Usage:
    """Token counts of one HTTP request, growing while it runs.

    Prompt tokens count once per prompt, however many samples it has.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._lengths: Counter[tuple[int, int]] = Counter()
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count one output of the engine."""
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        for sample in output.outputs:
            self._lengths[prompt_index, sample.index] += len(sample.token_ids)

    def longest_sample(self, prompt_index: int) -> int:
        """Return how many tokens the longest sample of a prompt has."""
        lengths = (length for (index, _), length in self._lengths.items() if index == prompt_index)
        return max(lengths, default=0)

    def body(self, num_reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return the `usage` object; cached tokens are reported even if there are none.

        Args:
          num_reasoning_tokens: of the generated ones; None where nobody looks for reasoning.
        """
        num_completion_tokens = self._lengths.total()
        body: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "total_tokens": self._num_prompt_tokens + num_completion_tokens,
            "completion_tokens": num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }
        if num_reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
        return body


@dataclass(slots=True)
class Choice:
    """All of one choice's deltas, joined."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def add(self, delta: CompletionOutput) -> None:
        """Append a delta."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True, kw_only=True)
class Generation:
    """What one HTTP request asks of the engine, and what it has used so far.

    Attributes:
      context: of the application.
      model: what the request names, an adapter or the base model.
      request: the decoded body.
      response_id: `id` of the answer.
      prompts: at least one.
      params: one per prompt; None where no token is to be generated.
      handling: of all prompts.
      drops_output: only what is known of the prompts is wanted; the token that has to be generated
        to learn it is not.
      created: Unix seconds, the same in every chunk.
      usage: counts what `outputs` has yielded.
      prompt_logprobs: of the prompts that have asked for them and have yielded something.
    """

    context: ServerContext
    model: ServedModel
    request: GenerationRequest
    response_id: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams | None]
    handling: Handling
    drops_output: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(init=False)
    prompt_logprobs: dict[int, PromptPositions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usage = Usage(self.prompts)
        if self.context.settings.log_requests:
            max_log_len = self.context.settings.observability.max_log_len
            log_request(
                self.response_id, self.params[0], self.prompts, max_log_len, lora=self.model.lora
            )

    @property
    def num_samples(self) -> int:
        """Choices per prompt."""
        return 1 if self.request.n is None else self.request.n

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        options = self.request.stream_options
        is_asked_for = options is not None and bool(options.include_usage)
        return is_asked_for or self.context.settings.force_include_usage

    @property
    def wants_usage_in_chunks(self) -> bool:
        """Whether every chunk of the stream carries the usage so far."""
        if self.context.settings.force_include_usage:
            return True
        options = self.request.stream_options
        return self.wants_usage_chunk and bool(options and options.continuous_usage_stats)

    @property
    def spells_token_ids(self) -> bool:
        """Whether log probabilities name tokens `token_id:123`."""
        asked = self.request.return_tokens_as_token_ids
        return self.context.settings.return_tokens_as_token_ids if asked is None else asked

    def envelope(self, kind: str) -> dict[str, Any]:
        """Return the first keys of every body and chunk."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
        }

    def usage_chunk(self, kind: str, num_reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return the last chunk of a stream that was asked to report usage; see `Usage.body`."""
        return {
            **self.envelope(kind),
            "choices": [],
            "usage": self.usage.body(num_reasoning_tokens),
            "system_fingerprint": self.context.fingerprint,
        }

    async def outputs(self) -> Outputs:
        """Yield the deltas of all prompts and count them.

        Closing the generator, or cancelling its consumer, aborts what still runs.

        Raises: what `AsyncEngine.generate` raises; ApiError if the engine gave a sample up.
        """
        runs = [self._run(index) for index in range(len(self.prompts))]
        try:
            if len(runs) == 1:  # one generator less between the engine and every token
                async with aclosing(runs[0]) as single:
                    async for output in single:
                        self._count(0, output)
                        yield 0, output
            else:
                async with aclosing(_merged(runs)) as merged:
                    async for index, output in merged:
                        self._count(index, output)
                        yield index, output
        except QueueFullError:
            self.context.metrics.count_rejection()
            raise

    def _count(self, index: int, output: RequestOutput) -> None:
        """Count an output; raise ApiError if the engine gave a sample up."""
        self.usage.add(index, output)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[index] = output.prompt_logprobs
        for sample in output.outputs:
            if sample.finish_reason == "error":
                if sample.stop_reason is not None:
                    raise self._constraint_error(sample.stop_reason)
                raise ApiError("The engine could not finish this request.", status=500)
        if output.finished and self.params[index] is not None:
            self.context.metrics.observe_longest_sample(self.usage.longest_sample(index))

    def _constraint_error(self, reason: str | int) -> ApiError:
        """Return the error of a sample whose constraint allows no token that goes on."""
        is_format = self.request.response_format is not None
        return ApiError(
            f"The output cannot be continued within its constraint: {reason}. Simplify it, or drop "
            "what forbids tokens (logit_bias, allowed_token_ids, bad_words).",
            param="response_format" if is_format else "structured_outputs",
        )

    async def choices(self) -> list[Choice]:
        """Run to the end and return all choices, those of the first prompt first."""
        choices = [Choice() for _ in range(len(self.prompts) * self.num_samples)]
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                for delta in output.outputs:
                    choices[index * self.num_samples + delta.index].add(delta)
        return choices

    def _run(self, index: int) -> AsyncGenerator[RequestOutput]:
        prompt, params = self.prompts[index], self.params[index]
        # Clients may repeat an id, the engine's must be unique.
        request_id = f"{self.response_id}-{index}-{uuid.uuid4().hex[:8]}"
        if params is None:
            return _nothing_generated(request_id, prompt, self.num_samples)
        outputs = self.context.engine.generate(
            prompt.token_ids,
            params,
            request_id=request_id,
            prompt=prompt.text,
            cache_salt=self.handling.cache_salt,
            cache_mode=self.handling.cache_mode,
            priority=self.handling.priority,
            lora=self.model.lora,
            stream=bool(self.request.stream),
        )
        outputs = self.context.request_watch.follow(
            request_id, params, outputs, model=self.model.name
        )
        if self.drops_output:
            return _without_output(outputs)
        # As in the reference, the coarser of the two.
        interval = max(self.request.stream_interval or 1, self.context.settings.stream_interval)
        if self.request.stream and interval > 1:
            return in_intervals(outputs, interval)
        return outputs


async def _merged(runs: Sequence[AsyncGenerator[RequestOutput]]) -> Outputs:
    """Yield from several generators as they come; the first error ends them all."""
    # One item per run: a consumer that waits on a slow client makes the runs wait, too.
    ready: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(len(runs))

    async def pump(index: int, run: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with aclosing(run):
                async for output in run:
                    await ready.put((index, output))
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    tasks = [asyncio.create_task(pump(index, run)) for index, run in enumerate(runs)]
    num_running = len(tasks)
    try:
        while num_running:
            item = await ready.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _nothing_generated(
    request_id: str, prompt: Prompt, num_samples: int
) -> AsyncGenerator[RequestOutput]:
    """Yield what the engine would say about a request for no tokens at all."""
    samples = tuple(
        CompletionOutput(index=index, text="", token_ids=(), finish_reason="length")
        for index in range(num_samples)
    )
    yield RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=tuple(prompt.token_ids),
        outputs=samples,
        finished=True,
    )


async def _without_output(outputs: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
    """Yield the ends of samples as if nothing had been generated."""
    async with aclosing(outputs):
        async for output in outputs:
            ended = tuple(
                CompletionOutput(index=sample.index, text="", token_ids=(), finish_reason="length")
                for sample in output.outputs
                if sample.finish_reason is not None
            )
            if ended:
                yield dataclasses.replace(output, outputs=ended)


def response_id(http_request: web.Request, request: GenerationRequest, prefix: str) -> str:
    """Return the id of the answer: the client's (header, then body) or a new one, prefixed."""
    header = http_request.headers.get("X-Request-Id", "")
    # Header bytes that are no UTF-8 arrive as surrogates, which JSON cannot carry.
    name = header.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return f"{prefix}-{name or request.request_id or uuid.uuid4().hex}"


def check_stream_options(request: GenerationRequest) -> None:
    """Refuse options of a stream that was not asked for."""
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream: true.", param="stream_options")
