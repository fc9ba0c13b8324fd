"""The answer of a chat as the chunks of a stream."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from paged.scheduler.output import CompletionOutput
from paged.server.answers import AnswerFormat, AnswerReader, count_reasoning_tokens, delta_fields
from paged.server.chat_answer import echo_of, logprobs_of, response_role
from paged.server.generation import Generation
from paged.server.protocol import ChatCompletionRequest
from paged.server.streaming import Chunk, Chunks, EventTemplate
from paged.server.tool_parsers.events import CallArguments, Content, Event, joined

_OBJECT = "chat.completion.chunk"


async def chat_chunks(
    generation: Generation, request: ChatCompletionRequest, format: AnswerFormat | None
) -> Chunks:
    """Yield the chunks of an answer as it is generated."""
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
        num_reasoning_tokens = await count_reasoning_tokens(generation.context, readers)
        yield [generation.usage_chunk(_OBJECT, num_reasoning_tokens)]


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
    deltas: list[dict[str, str]] = [{"role": response_role(generation, request), "content": ""}]
    if echo := echo_of(generation, request):
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
        "logprobs": logprobs_of(generation, request, delta.token_ids, delta.logprobs or ())
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
    return {**generation.envelope(_OBJECT), "choices": [{"index": index, **choice}]}
