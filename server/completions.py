"""POST /v1/completions."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from paged.scheduler.output import CompletionOutput
from paged.scheduler.params import SamplingParams
from paged.server.context import CONTEXT, ServerContext
from paged.server.errors import ApiError, json_response
from paged.server.generation import Choice, Generation, check_stream_options, response_id
from paged.server.handling import handling_of
from paged.server.logprobs import CompletionLogprobs
from paged.server.prompts import Prompt, completion_prompts, vocab_size
from paged.server.protocol import CompletionRequest, decode_body, read_json
from paged.server.sampling import resolve_max_tokens, sampling_params
from paged.server.streaming import Chunk, Chunks, EventTemplate, send_events
from paged.server.unsupported import refuse_unsupported

_OBJECT = "text_completion"
_DEFAULT_MAX_TOKENS = 16


async def completions(http_request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    request = decode_body(await read_json(http_request), CompletionRequest)
    context.check_model(request.model)
    refuse_unsupported(request)
    check_stream_options(request)
    handling = handling_of(http_request, request)
    if request.echo and request.logprobs is not None:
        raise ApiError(
            "echo with logprobs needs log probabilities of the prompt, which this version does "
            "not support. Send one of the two.",
            param="logprobs",
        )
    prompts = await completion_prompts(context, request)
    generation = Generation(
        context=context,
        request=request,
        response_id=response_id(http_request, request, "cmpl"),
        prompts=prompts,
        params=_params(context, request, prompts),
        handling=handling,
    )
    if request.stream:
        return await send_events(http_request, _chunks(generation, request))
    return json_response(await _body(generation, request))


def _params(
    context: ServerContext, request: CompletionRequest, prompts: list[Prompt]
) -> list[SamplingParams | None]:
    """Return the parameters of each prompt; None for all if only the prompt is wanted back."""
    requested = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    only_echo = bool(request.echo) and requested == 0
    by_max_tokens: dict[int, SamplingParams] = {}
    chosen: list[SamplingParams | None] = []
    for prompt in prompts:
        max_tokens = resolve_max_tokens(
            1 if only_echo else requested,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=context.engine.max_model_len,
        )
        if max_tokens not in by_max_tokens:
            by_max_tokens[max_tokens] = sampling_params(
                request,
                context.sampling_defaults,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                vocab_size=vocab_size(context),
            )
        chosen.append(None if only_echo else by_max_tokens[max_tokens])
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
    prompt = generation.prompts[index // generation.num_samples]
    logprobs = None
    if request.logprobs is not None:
        spelling = CompletionLogprobs(as_token_ids=bool(request.return_tokens_as_token_ids))
        logprobs = spelling.body(choice.token_ids, choice.logprobs)
    return {
        "index": index,
        "text": _echo(generation, request, prompt) + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if request.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt.token_ids if request.return_token_ids else None,
    }


def _echo(generation: Generation, request: CompletionRequest, prompt: Prompt) -> str:
    """Return the prompt's text if it is wanted in front of the completion."""
    # With return_token_ids the prompt is there as ids, and the reference leaves its text out.
    if not request.echo or request.return_token_ids:
        return ""
    if prompt.text is not None:
        return prompt.text
    return generation.context.engine.tokenizer.decode(
        prompt.token_ids, skip_special_tokens=request.skip_special_tokens
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
        self._logprobs = CompletionLogprobs(as_token_ids=bool(request.return_tokens_as_token_ids))
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
        if delta.logprobs:
            logprobs = self._logprobs.body(delta.token_ids, delta.logprobs)
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
