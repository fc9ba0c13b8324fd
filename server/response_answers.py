"""Bodies and events of /v1/responses as structs.

Source: https://platform.openai.com/docs/api-reference/responses and `.../responses-streaming`.
"""

from typing import Any, Literal

from msgspec import Struct, field

from paged.server.answer_bodies import Answer, PositionLogprobs

type Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Answer):
    """A text of an answer."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class ReasoningText(Answer):
    """What the model thought."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


type Part = OutputText | ReasoningText


class MessageItem(Answer, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Answer, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)


class FunctionCallItem(Answer, tag_field="type", tag="function_call"):
    """A call that the model wants made; its result comes back as `function_call_output`."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


type Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Answer):
    """Of the input, what the prefix cache had."""

    cached_tokens: int


class OutputTokensDetails(Answer):
    """Of the output, what was thought."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    """Why a response failed."""

    code: str
    message: str


type IncompleteReason = Literal["max_output_tokens", "repetition"]


class IncompleteDetails(Answer):
    """Why a response ends before its end; "repetition" is this server's own."""

    reason: IncompleteReason


class ResponseAnswer(Answer):
    """A response; what was asked for is repeated in it."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    tool_choice: Any
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    store: bool
    object: Literal["response"] = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    previous_response_id: str | None = None
    service_tier: str = "default"
    top_logprobs: int = 0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Answer):
    """That a response is forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


# -- Events, numbered from 0 in each stream


class Event(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all events; `sequence_number` is given when it is sent."""

    sequence_number: int = -1


class ResponseEvent(Event):
    """An event about the whole response."""

    response: ResponseAnswer


class ResponseCreated(ResponseEvent, tag="response.created"):
    """It exists."""


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    """It runs."""


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    """It is whole."""


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """It was cut off."""


class ResponseFailed(ResponseEvent, tag="response.failed"):
    """It could not be finished."""


class ItemEvent(Event):
    """An event about a whole item."""

    output_index: int
    item: Item


class OutputItemAdded(ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(ItemEvent, tag="response.output_item.done"):
    """An item is whole."""


class WithinItem(Event):
    """An event within an item."""

    item_id: str
    output_index: int


class WithinPart(WithinItem, kw_only=True):
    """An event within a part of an item."""

    content_index: int = 0


class ContentPartAdded(WithinPart, tag="response.content_part.added"):
    """A part begins."""

    part: dict[str, Any]


class ContentPartDone(WithinPart, tag="response.content_part.done"):
    """A part is whole."""

    part: dict[str, Any]


class OutputTextDelta(WithinPart, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[PositionLogprobs]


class OutputTextDone(WithinPart, tag="response.output_text.done"):
    """All of a text."""

    text: str
    logprobs: list[PositionLogprobs]


class ReasoningTextDelta(WithinPart, tag="response.reasoning_text.delta"):
    """More thought."""

    delta: str


class ReasoningTextDone(WithinPart, tag="response.reasoning_text.done"):
    """All that was thought."""

    text: str


class CallArgumentsDelta(WithinItem, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class CallArgumentsDone(WithinItem, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    name: str
    arguments: str


type AnyEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
)
