"""`ResponseRun`: one response on its way, whole, as events, or in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from paged.scheduler.output import CompletionOutput
from paged.server.answer_bodies import PositionLogprobs
from paged.server.answers import AnswerFormat, count_reasoning_tokens
from paged.server.chat_answer import num_shown_logprobs
from paged.server.context import ServerContext
from paged.server.errors import ApiError, to_api_error
from paged.server.generation import Generation
from paged.server.logprobs import chat_logprobs
from paged.server.protocol import ChatCompletionRequest, ChatMessage
from paged.server.response_answers import (
    AnyEvent,
    IncompleteDetails,
    IncompleteReason,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
)
from paged.server.response_items import ResponseItems
from paged.server.response_request import (
    ResponseRequest,
    output_messages,
    wants_logprobs,
)
from paged.server.response_store import StoredResponse
from paged.server.tool_parsers.events import Content, Event


class ResponseRun:
    """One response on its way (mutable).

    Args:
      generation: its run through the engine.
      request: what was asked.
      as_chat: the same in the words of the chat endpoint.
      format: how its text is taken apart, None if all of it is content.
      messages: the conversation before it.
      tenant: who may read it.
      num_bytes: of the conversation before it.
    """

    def __init__(
        self,
        generation: Generation,
        request: ResponseRequest,
        as_chat: ChatCompletionRequest,
        format: AnswerFormat | None,
        *,
        messages: Sequence[ChatMessage],
        tenant: str,
        num_bytes: int,
    ) -> None:
        self._generation = generation
        self._request = request
        self._as_chat = as_chat
        self._reader = None if format is None else format.reader()
        self._shows_tokens = format is None or not format.hides_tokens
        self._messages = messages
        self._tenant = tenant
        self._num_bytes = num_bytes
        self._items = ResponseItems()
        self._response = _opening(generation, request)
        self._num_events = 0

    def start_in_background(self, context: ServerContext) -> ResponseAnswer:
        """Let it run without a connection, and return it as it is now.

        Raises: ApiError if it would not be stored: nobody could ask for it.
        """
        response = self._response
        if not response.store:
            raise ApiError(
                "background needs store: true, and a server with --max-stored-responses above 0.",
                param="background",
            )
        context.responses.put(self._tenant, StoredResponse(response, (), self._num_bytes))
        context.response_tasks.start(self._tenant, response.id, self._run_alone())
        return response

    async def _run_alone(self) -> None:
        """Run to the end, which the stored response tells of, whatever it is."""
        try:
            await self.answer()
        except asyncio.CancelledError:
            self._response.status = "cancelled"
            raise
        except Exception as error:
            self._fail(error)

    async def answer(self) -> ResponseAnswer:
        """Run to the end and return the whole response."""
        async with aclosing(self._steps()) as steps:
            async for _ in steps:
                pass
        return self._response

    async def events(self) -> AsyncGenerator[list[bytes]]:
        """Yield the events of the stream as they are written; what fails later is an event."""
        started = False
        try:
            async with aclosing(self._steps()) as steps:
                async for step in steps:
                    if not started:
                        started = True
                        before = msgspec.structs.replace(self._opened)
                        yield self._encode(
                            [ResponseCreated(response=before), ResponseInProgress(response=before)]
                        )
                    if step:
                        yield self._encode(step)
        except Exception as error:
            if not started or isinstance(error, ConnectionError):
                raise
            self._fail(error)
            yield self._encode([ResponseFailed(response=self._response)])

    def _fail(self, error: Exception) -> None:
        self._response.status = "failed"
        self._response.output = self._items.output
        message = to_api_error(error).message
        self._response.error = ResponseError(code="server_error", message=message)

    async def _steps(self) -> AsyncGenerator[list[AnyEvent]]:
        """Yield what each output of the engine adds; `_response` is whole at the end."""
        self._opened = msgspec.structs.replace(self._response)
        finish_reason: str | None = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for delta in output.outputs:
                    finish_reason = delta.finish_reason or finish_reason
                    yield self._items.feed(self._read(delta), self._logprobs(delta))
        is_complete = finish_reason == "stop"
        closing = self._items.finish(is_complete=is_complete)
        await self._complete(finish_reason)
        kind = ResponseCompleted if is_complete else ResponseIncomplete
        yield [*closing, kind(response=self._response)]

    def _read(self, delta: CompletionOutput) -> list[Event]:
        """Return what a delta's text says; that of the last one, with all that was held back."""
        if self._reader is None:
            return [Content(delta.text)] if delta.text else []
        events = self._reader.feed(delta.text)
        return events + self._reader.finish() if delta.finish_reason else events

    async def _complete(self, finish_reason: str | None) -> None:
        response, usage = self._response, self._generation.usage.body()
        response.status = "completed" if finish_reason == "stop" else "incomplete"
        if finish_reason != "stop":
            is_cut = finish_reason != "repetition"
            reason: IncompleteReason = "max_output_tokens" if is_cut else "repetition"
            response.incomplete_details = IncompleteDetails(reason=reason)
        response.output = self._items.output
        response.completed_at = int(time.time())
        readers = [] if self._reader is None else [self._reader]
        num_reasoning_tokens = await count_reasoning_tokens(self._generation.context, readers)
        response.usage = ResponseUsage(
            input_tokens=usage["prompt_tokens"],
            input_tokens_details=InputTokensDetails(**usage["prompt_tokens_details"]),
            output_tokens=usage["completion_tokens"],
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning_tokens or 0),
            total_tokens=usage["total_tokens"],
        )
        if response.store:
            said = output_messages(response.output)
            num_bytes = self._num_bytes + len(msgspec.json.encode(response))
            stored = StoredResponse(response, (*self._messages, *said), num_bytes)
            self._generation.context.responses.put(self._tenant, stored)

    def _logprobs(self, delta: CompletionOutput) -> list[PositionLogprobs]:
        if not (wants_logprobs(self._request) and self._shows_tokens and delta.logprobs):
            return []
        spelled = chat_logprobs(
            self._generation.context.engine.tokenizer,
            delta.token_ids,
            delta.logprobs,
            num_top=num_shown_logprobs(self._as_chat),
            as_token_ids=self._generation.spells_token_ids,
        )
        return msgspec.convert(spelled["content"], list[PositionLogprobs])

    def _encode(self, events: Sequence[AnyEvent]) -> list[bytes]:
        encoded = []
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
            kind: Any = type(event).__struct_config__.tag
            encoded.append(f"event: {kind}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n")
        return encoded


def _opening(generation: Generation, request: ResponseRequest) -> ResponseAnswer:
    """Return the response before anything has been generated."""
    (params,) = generation.params
    assert params is not None
    context: ServerContext = generation.context
    text = {} if request.text is None else msgspec.to_builtins(request.text)
    reasoning = request.reasoning
    return ResponseAnswer(
        id=generation.response_id,
        created_at=generation.created,
        status="in_progress",
        model=generation.model.name,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=params.temperature,
        top_p=params.top_p,
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        text={**text, "format": text.get("format") or {"type": "text"}},
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        background=bool(request.background),
        store=request.store is not False and context.responses.is_enabled,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        previous_response_id=request.previous_response_id,
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
    )
