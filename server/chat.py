"""POST /v1/chat/completions."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from paged.scheduler.output import CompletionOutput, PositionLogprobs
from paged.scheduler.params import MAX_LOGPROBS, ParameterError, SamplingParams
from paged.server.answers import (
    AnswerFormat,
    AnswerReader,
    answer_format,
    count_reasoning_tokens,
    delta_fields,
    message_fields,
)
from paged.server.context import CONTEXT, ServerContext
from paged.server.conversation import text_of
from paged.server.errors import ApiError, json_response
from paged.server.generation import Choice, Generation, check_stream_options, response_id
from paged.server.handling import handling_of
from paged.server.limits import check_limits
from paged.server.logprobs import chat_logprobs, prompt_logprobs_body
from paged.server.prompts import Prompt, chat_prompt, vocab_size
from paged.server.protocol import ChatCompletionRequest, decode_body, read_json
from paged.server.sampling import (
    requested_prompt_logprobs,
    resolve_max_tokens,
    sampling_params,
)
from paged.server.streaming import Chunk, Chunks, EventTemplate, send_events
from paged.server.tool_parsers.events import CallArguments, Content, Event, joined
from paged.server.tools import check_tools
from paged.server.unsupported import refuse_unsupported

_OBJECT = "chat.completion"
_CHUNK_OBJECT = "chat.completion.chunk"


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    request = decode_body(await read_json(http_request), ChatCompletionRequest)
    model = context.models.find(request.model)
    refuse_unsupported(request)
    check_limits(context.settings, request)
    check_tools(request)
    check_stream_options(request)
    handling = handling_of(http_request, request)
    num_logprobs = num_logprobs_of(request)
    prompt = await chat_prompt(context, request)
    format = answer_format(context, request, prompt)
    params = chat_params(context, request, prompt, num_logprobs)
    generation = Generation(
        context=context,
        model=model,
        request=request,
        response_id=response_id(http_request, request, "chatcmpl"),
        prompts=[prompt],
        params=[params if format is None else format.adjusted(params)],
        handling=handling,
    )
    if request.stream:
        return await send_events(http_request, _chunks(generation, request, format))
    return json_response(await _body(generation, request, format))


def chat_params(
    context: ServerContext, request: ChatCompletionRequest, prompt: Prompt, num_logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters of a conversation's answer."""
    requested = request.max_completion_tokens
    if requested is None:
        requested = request.max_tokens
    if requested is None and "max_tokens" in context.sampling_defaults:
        # The model's own limit, unlike a client's, may exceed a context that was made shorter.
        limit = context.engine.max_model_len
        requested = min(context.sampling_defaults["max_tokens"], limit)
    return sampling_params(
        request,
        context.sampling_defaults,
        max_tokens=resolve_max_tokens(
            requested,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=context.engine.max_model_len,
            cap=context.max_tokens_cap,
        ),
        logprobs=num_logprobs,
        prompt_logprobs=requested_prompt_logprobs(request),
        vocab_size=vocab_size(context),
    )


def num_logprobs_of(request: ChatCompletionRequest) -> int | None:
    """Return the alternatives per token, None if log probabilities are not wanted."""
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise ParameterError("top_logprobs", top, f"must be in [0, {MAX_LOGPROBS}]")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    return top if request.logprobs else None


def num_shown_logprobs(request: ChatCompletionRequest) -> int:
    """Return how many candidates each position lists."""
    if request.logprob_token_ids:
        return 1 + len(request.logprob_token_ids)
    return request.top_logprobs or 0


async def _body(
    generation: Generation, request: ChatCompletionRequest, format: AnswerFormat | None
) -> dict[str, Any]:
    choices = await generation.choices()
    readers = [] if format is None else [format.reader() for _ in choices]
    (prompt,) = generation.prompts
    return {
        **generation.envelope(_OBJECT),
        "choices": [
            _choice(generation, request, choice, index, readers[index] if readers else None)
            for index, choice in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": generation.context.fingerprint,
        "usage": generation.usage.body(await _num_reasoning_tokens(generation, readers)),
        "prompt_logprobs": prompt_logprobs_body(generation.prompt_logprobs.get(0)),
        "prompt_token_ids": prompt.token_ids if request.return_token_ids else None,
        "prompt_text": prompt.text if request.return_prompt_text else None,
        "kv_transfer_params": None,
    }


async def _num_reasoning_tokens(
    generation: Generation, readers: Sequence[AnswerReader]
) -> int | None:
    """Return the tokens of what has been read as reasoning; None if this server looks for none."""
    context = generation.context
    if context.reasoning_format is None:
        return None
    return await count_reasoning_tokens(context, readers)


def _choice(
    generation: Generation,
    request: ChatCompletionRequest,
    choice: Choice,
    index: int,
    reader: AnswerReader | None,
) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": choice.text}
    finish_reason = choice.finish_reason
    if reader is not None:
        fields = message_fields(reader.feed(choice.text) + reader.finish(), reader.make_id)
        finish_reason = reader.finish_reason(finish_reason)
    if echo := _echo(generation, request):
        fields["content"] = echo + (fields["content"] or "")
    shows_tokens = reader is None or not reader.format.hides_tokens
    logprobs = _logprobs(generation, request, choice.token_ids, choice.logprobs)
    return {
        "index": index,
        "message": {
            "role": _response_role(generation, request),
            "content": fields.pop("content"),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({"tool_calls": fields.pop("tool_calls")} if "tool_calls" in fields else {}),
            "reasoning": None,
            **fields,
        },
        "logprobs": logprobs if shows_tokens else None,
        "finish_reason": finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if request.return_token_ids and shows_tokens else None,
    }


def _response_role(generation: Generation, request: ChatCompletionRequest) -> str:
    """Return the answer's role: that of the last message where this one is continued."""
    if request.add_generation_prompt or not request.messages:
        return generation.context.settings.response_role
    return request.messages[-1].role


def _echo(generation: Generation, request: ChatCompletionRequest) -> str:
    """Return the last message if it is wanted in front of the answer and has the same role."""
    if not request.echo or not request.messages:
        return ""
    last = request.messages[-1]
    return text_of(last) if last.role == _response_role(generation, request) else ""


def _logprobs(
    generation: Generation,
    request: ChatCompletionRequest,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    return chat_logprobs(
        generation.context.engine.tokenizer,
        token_ids,
        positions,
        num_top=num_shown_logprobs(request),
        as_token_ids=generation.spells_token_ids,
    )


async def _chunks(
    generation: Generation, request: ChatCompletionRequest, format: AnswerFormat | None
) -> Chunks:
    is_first = True
    make_chunks = _plain_chunks(generation, request)
    readers: list[AnswerReader] = []
    if format is not None:
        readers = [format.reader() for _ in range(generation.num_samples)]
        make_chunks = _read_chunks(generation, request, readers)
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            group: list[Chunk | bytes] = []
            if is_first:
                group += _first_chunks(generation, request)
                is_first = False
            for delta in output.outputs:
                group += make_chunks(delta)
            if group:
                yield group
    if generation.wants_usage_chunk:
        num_reasoning_tokens = await _num_reasoning_tokens(generation, readers)
        yield [generation.usage_chunk(_CHUNK_OBJECT, num_reasoning_tokens)]


type _MakeChunks = Callable[[CompletionOutput], Sequence[Chunk | bytes]]


def _plain_chunks(generation: Generation, request: ChatCompletionRequest) -> _MakeChunks:
    """Return what makes the chunks of a delta whose text is all content."""
    templates: dict[int, EventTemplate] = {}
    says_more = bool(request.return_token_ids or generation.wants_usage_in_chunks)

    def make(delta: CompletionOutput) -> Sequence[Chunk | bytes]:
        if says_more or delta.logprobs or delta.finish_reason:
            return _delta_chunks(generation, request, delta)
        if not delta.text:
            return ()
        if delta.index not in templates:
            templates[delta.index] = _text_template(generation, request, delta.index)
        return (templates[delta.index].event(delta.text),)

    return make


def _read_chunks(
    generation: Generation, request: ChatCompletionRequest, readers: Sequence[AnswerReader]
) -> _MakeChunks:
    """Return what makes the chunks of a delta whose text is taken apart, by its sample's reader."""
    templates: dict[tuple[int, Event], EventTemplate] = {}
    says_more = bool(request.return_token_ids or generation.wants_usage_in_chunks)

    def quick(index: int, event: Content | CallArguments) -> bytes:
        """Return the chunk of an event with nothing else to say."""

        def chunk(text: str) -> Chunk:
            part = CompletionOutput(index, "", ())
            fields = delta_fields(dataclasses.replace(event, text=text), str)
            (of_event,) = _delta_chunks(generation, request, part, fields)
            return of_event

        key = index, dataclasses.replace(event, text="")
        if key not in templates:
            templates[key] = EventTemplate(chunk)
        return templates[key].event(event.text)

    def make(delta: CompletionOutput) -> Sequence[Chunk | bytes]:
        reader = readers[delta.index]
        events = reader.feed(delta.text)
        if not (says_more or delta.logprobs or delta.finish_reason):
            if not events:
                return ()
            if len(events) == 1 and isinstance(events[0], Content | CallArguments):
                return (quick(delta.index, events[0]),)
        if delta.finish_reason:
            events = joined(events + reader.finish())
        deltas = [delta_fields(event, reader.make_id) for event in events]
        shown = CompletionOutput(delta.index, "", ())
        if not reader.format.hides_tokens:
            shown = dataclasses.replace(shown, token_ids=delta.token_ids, logprobs=delta.logprobs)
        if delta.finish_reason or not deltas:
            deltas.append({})
        chunks: list[Chunk] = []
        for number, fields in enumerate(deltas, 1):
            part = shown if number == 1 else CompletionOutput(delta.index, "", ())
            if number == len(deltas) and delta.finish_reason:
                part.finish_reason = reader.finish_reason(delta.finish_reason)
                part.stop_reason = delta.stop_reason
            chunks += _delta_chunks(generation, request, part, fields)
        return chunks

    return make


def _text_template(
    generation: Generation, request: ChatCompletionRequest, index: int
) -> EventTemplate:
    """Return the template of the chunks that have a text and nothing else to say."""

    def chunk(text: str) -> Chunk:
        (of_delta,) = _delta_chunks(generation, request, CompletionOutput(index, text, ()))
        return of_delta

    return EventTemplate(chunk)


def _first_chunks(generation: Generation, request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Return the chunks that open every choice: its role, and the echo if there is one."""
    (prompt,) = generation.prompts
    opening: dict[str, Any] = {
        "prompt_token_ids": prompt.token_ids if request.return_token_ids else None,
        "prompt_text": prompt.text if request.return_prompt_text else None,
    }
    if generation.wants_usage_in_chunks:
        usage = generation.usage.body()
        opening["usage"] = {**usage, "total_tokens": usage["prompt_tokens"], "completion_tokens": 0}
    deltas: list[dict[str, str]] = [{"role": _response_role(generation, request), "content": ""}]
    if echo := _echo(generation, request):
        deltas.append({"content": echo})
    return [
        {
            **_chunk(generation, index, {"delta": delta, "logprobs": None, "finish_reason": None}),
            **opening,
        }
        for delta in deltas
        for index in range(generation.num_samples)
    ]


def _delta_chunks(
    generation: Generation,
    request: ChatCompletionRequest,
    delta: CompletionOutput,
    fields: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the chunk of a delta; none if there is nothing to say yet.

    Args:
      generation: of the request.
      request: the body.
      delta: of a choice.
      fields: to be said instead of its text.
    """
    token_ids = list(delta.token_ids) if request.return_token_ids else None
    if not (fields or delta.text or delta.logprobs or token_ids or delta.finish_reason):
        return []
    choice: dict[str, Any] = {
        "delta": {"content": delta.text} if fields is None else fields,
        "logprobs": _logprobs(generation, request, delta.token_ids, delta.logprobs or ())
        if delta.logprobs or fields is None
        else None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason:
        choice["stop_reason"] = delta.stop_reason
    choice["token_ids"] = token_ids
    chunk = _chunk(generation, delta.index, choice)
    if generation.wants_usage_in_chunks:
        chunk["usage"] = generation.usage.body()
    if delta.finish_reason and not generation.wants_usage_chunk:
        chunk["system_fingerprint"] = generation.context.fingerprint
    return [chunk]


def _chunk(generation: Generation, index: int, choice: dict[str, Any]) -> dict[str, Any]:
    return {**generation.envelope(_CHUNK_OBJECT), "choices": [{"index": index, **choice}]}
