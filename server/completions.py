"""POST /v1/completions."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from paged.scheduler.output import CompletionOutput, PositionLogprobs
from paged.scheduler.params import SamplingParams
from paged.server.context import CONTEXT, ServerContext
from paged.server.errors import json_response
from paged.server.generation import Choice, Generation, check_stream_options, response_id
from paged.server.handling import handling_of
from paged.server.limits import check_limits
from paged.server.logprobs import CompletionLogprobs, prompt_logprobs_body
from paged.server.prompts import Prompt, completion_prompts, vocab_size
from paged.server.protocol import CompletionRequest, decode_body, read_json
from paged.server.sampling import (
    requested_prompt_logprobs,
    resolve_max_tokens,
    sampling_params,
)
from paged.server.streaming import Chunk, Chunks, EventTemplate, send_events
from paged.server.unsupported import refuse_unsupported

_OBJECT = "text_completion"
_DEFAULT_MAX_TOKENS = 16


async def completions(http_request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    request = decode_body(await read_json(http_request), CompletionRequest)
    model = context.models.find(request.model)
    refuse_unsupported(request)
    check_limits(context.settings, request)
    check_stream_options(request)
    handling = handling_of(http_request, request)
    num_prompt_logprobs = requested_prompt_logprobs(request)
    if num_prompt_logprobs is None and request.echo:
        num_prompt_logprobs = request.logprobs  # what is echoed has them, too
    prompts = await completion_prompts(context, request)
    generation = Generation(
        context=context,
        model=model,
        request=request,
        response_id=response_id(http_request, request, "cmpl"),
        prompts=prompts,
        params=_params(context, request, prompts, num_prompt_logprobs),
        handling=handling,
        drops_output=_wants_only_echo(request),
    )
    if request.stream:
        return await send_events(http_request, _chunks(generation, request))
    return json_response(await _body(generation, request))


def _wants_only_echo(request: CompletionRequest) -> bool:
    """Whether nothing is to be generated."""
    return bool(request.echo) and request.max_tokens == 0


def _params(
    context: ServerContext,
    request: CompletionRequest,
    prompts: list[Prompt],
    num_prompt_logprobs: int | None,
) -> list[SamplingParams | None]:
    """Return the parameters of each prompt; None for all if the engine has nothing to compute."""
    requested = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    only_echo = _wants_only_echo(request)
    by_max_tokens: dict[int, SamplingParams] = {}
    chosen: list[SamplingParams | None] = []
    for prompt in prompts:
        max_tokens = resolve_max_tokens(
            1 if only_echo else requested,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=context.engine.max_model_len,
            cap=context.max_tokens_cap,
        )
        if max_tokens not in by_max_tokens:
            by_max_tokens[max_tokens] = sampling_params(
                request,
                context.sampling_defaults,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=num_prompt_logprobs,
                vocab_size=vocab_size(context),
            )
        is_idle = only_echo and num_prompt_logprobs is None
        chosen.append(None if is_idle else by_max_tokens[max_tokens])
    return chosen


async def _body(generation: Generation, request: CompletionRequest) -> dict[str, Any]:
    choices = await generation.choices()
    return {
        **generation.envelope(_OBJECT),
        "choices": [
            _choice(generation, request, index, choice) for index, choice in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": generation.context.fingerprint,
        "usage": generation.usage.body(),
        "kv_transfer_params": None,
    }


def _choice(
    generation: Generation, request: CompletionRequest, index: int, choice: Choice
) -> dict[str, Any]:
    prompt_index = index // generation.num_samples
    prompt = generation.prompts[prompt_index]
    prompt_logprobs = generation.prompt_logprobs.get(prompt_index)
    logprobs = None
    if request.logprobs is not None:
        token_ids, positions = _echoed(generation, request, prompt_index)
        spelling = _spelling(generation, request)
        logprobs = spelling.body([*token_ids, *choice.token_ids], [*positions, *choice.logprobs])
    return {
        "index": index,
        "text": _echo(generation, request, prompt) + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if request.return_token_ids else None,
        "prompt_logprobs": prompt_logprobs_body(prompt_logprobs),
        "prompt_token_ids": prompt.token_ids if request.return_token_ids else None,
    }


def _spelling(generation: Generation, request: CompletionRequest) -> CompletionLogprobs:
    return CompletionLogprobs(
        generation.context.engine.tokenizer,
        as_token_ids=generation.spells_token_ids,
    )


def _echoed(
    generation: Generation, request: CompletionRequest, prompt_index: int
) -> tuple[list[int], list[PositionLogprobs | None]]:
    """Return tokens and log probabilities of the prompt if they come before the completion's."""
    positions = generation.prompt_logprobs.get(prompt_index)
    if not request.echo or request.logprobs is None or positions is None:
        return [], []
    return list(generation.prompts[prompt_index].token_ids), list(positions)


def _echo(generation: Generation, request: CompletionRequest, prompt: Prompt) -> str:
    """Return the prompt's text if it is wanted in front of the completion."""
    # With return_token_ids the prompt is there as ids, and the reference leaves its text out.
    if not request.echo or request.return_token_ids:
        return ""
    if prompt.text is not None:
        return prompt.text
    return generation.context.engine.tokenizer.decode(
        prompt.token_ids, skip_special_tokens=request.skip_special_tokens is not False
    )


async def _chunks(generation: Generation, request: CompletionRequest) -> Chunks:
    streams: dict[int, _ChoiceStream] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for prompt_index, output in outputs:
            group: list[Chunk | bytes] = []
            for delta in output.outputs:
                index = prompt_index * generation.num_samples + delta.index
                if index not in streams:
                    prompt = generation.prompts[prompt_index]
                    streams[index] = _ChoiceStream(generation, request, index, prompt)
                group += streams[index].chunks(delta)
            if group:
                yield group
    if generation.wants_usage_chunk:
        yield [generation.usage_chunk(_OBJECT)]


class _ChoiceStream:
    """One choice of a stream: what was already sent decides what the next chunk holds."""

    def __init__(
        self, generation: Generation, request: CompletionRequest, index: int, prompt: Prompt
    ) -> None:
        self._generation = generation
        self._request = request
        self._index = index
        self._prompt: Prompt | None = prompt  # until it has been sent
        self._logprobs = _spelling(generation, request)
        # Of the chunks that have a text and nothing else to say; made when one is needed.
        self._template: EventTemplate | None = None
        self._says_more = bool(request.return_token_ids or generation.wants_usage_in_chunks)

    def chunks(self, delta: CompletionOutput) -> list[Chunk | bytes]:
        """Return the chunk of a delta; none if there is nothing to say yet."""
        generation, request = self._generation, self._request
        if self._prompt is None and not (self._says_more or delta.logprobs or delta.finish_reason):
            if not delta.text:
                return []
            if self._template is None:
                self._template = EventTemplate(lambda text: self._chunk(text=text))
            return [self._template.event(delta.text)]
        text, prompt_token_ids = delta.text, None
        if self._prompt is not None:
            text = _echo(generation, request, self._prompt) + text
            if request.return_token_ids:
                prompt_token_ids = self._prompt.token_ids
        logprobs = None
        token_ids_before, positions = self._echoed() if self._prompt is not None else ([], [])
        if delta.logprobs or positions:
            logprobs = self._logprobs.body(
                [*token_ids_before, *delta.token_ids], [*positions, *(delta.logprobs or ())]
            )
        token_ids = list(delta.token_ids) if request.return_token_ids else None
        if not (text or logprobs or token_ids or delta.finish_reason):
            return []
        self._prompt = None
        chunk = self._chunk(
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=prompt_token_ids,
            token_ids=token_ids,
        )
        if generation.wants_usage_in_chunks:
            chunk["usage"] = generation.usage.body()
        if delta.finish_reason and not generation.wants_usage_chunk:
            chunk["system_fingerprint"] = generation.context.fingerprint
        return [chunk]

    def _echoed(self) -> tuple[list[int], list[PositionLogprobs | None]]:
        prompt_index = self._index // self._generation.num_samples
        return _echoed(self._generation, self._request, prompt_index)

    def _chunk(
        self,
        *,
        text: str,
        logprobs: Chunk | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Chunk:
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "prompt_token_ids": prompt_token_ids,
            "token_ids": token_ids,
        }
        return {**self._generation.envelope(_OBJECT), "choices": [choice]}
