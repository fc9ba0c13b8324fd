"""Requests to /v1/responses as structs, and as conversations that the chat endpoint would see."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from paged.server.errors import ApiError
from paged.server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    JsonObject,
    Priority,
    RepetitionDetectionFields,
    RequestId,
    StopStrings,
    StreamInterval,
    TokenIds,
)
from paged.server.response_answers import Item

type Metadata = Annotated[dict[str, str], Meta(max_length=16)]


class InputPart(Struct, kw_only=True):
    """One part of an input; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """One item of the input: a message, a call, its output, or a thought."""

    type: str | None = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    summary: list[InputPart] | None = None


class TextFormat(Struct, kw_only=True):
    """What form the text shall have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, kw_only=True):
    """`text` of a request."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, kw_only=True):
    """`reasoning` of a request."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ResponseRequest(Struct, kw_only=True):
    """Body of POST /v1/responses; the last fields are this server's own."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    prompt: Any = None
    conversation: Any = None

    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = False
    min_tokens: int | None = None
    logprob_token_ids: TokenIds | None = None
    repetition_detection: RepetitionDetectionFields | None = None
    stream_interval: StreamInterval | None = None
    chat_template_kwargs: JsonObject | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    cache: Any = None
    request_id: RequestId | None = None
    priority: Priority | None = None


# Fields of the API that this server cannot do: what to do instead.
_REMEDIES = {
    "prompt": "Send its text as instructions or input.",
    "conversation": "Use previous_response_id, or send the whole conversation as input.",
    "max_tool_calls": "Leave it out; this server calls no tools by itself.",
}
_LOGPROBS = "message.output_text.logprobs"

# Names of the chat endpoint's fields as they are called here.
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}

# The fields that mean the same to the chat endpoint.
_SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "chat_template_kwargs", "cache_salt", "cache", "request_id", "priority", "stream",
    "parallel_tool_calls", "logprob_token_ids", "repetition_detection", "stream_interval",
)  # fmt: skip


def refuse_unsupported_fields(request: ResponseRequest) -> None:
    """Raise the error of the first field that asks for something this version cannot do."""
    for field, remedy in _REMEDIES.items():
        if getattr(request, field) not in (None, False):
            raise ApiError(f"`{field}` is not supported by this version. {remedy}", param=field)
    if request.background and request.stream:
        raise ApiError("background cannot be streamed; send one of the two.", param="stream")
    if request.truncation == "auto":
        raise ApiError(
            "truncation 'auto' is not supported by this version. Send a shorter conversation.",
            param="truncation",
        )
    for name in request.include or ():
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            raise ApiError(
                f"include {name[:80]!r} is not supported by this version; of its values only "
                f"{_LOGPROBS!r} has an effect here.",
                param="include",
            )


def wants_logprobs(request: ResponseRequest) -> bool:
    """Return whether the tokens' log probabilities are wanted."""
    is_asked_for = _LOGPROBS in (request.include or ())
    return is_asked_for or bool(request.top_logprobs) or bool(request.logprob_token_ids)


def chat_request(
    request: ResponseRequest, messages: Sequence[ChatMessage]
) -> ChatCompletionRequest:
    """Return what the chat endpoint would be asked.

    Args:
      request: of the Responses API.
      messages: the conversation before the answer, without instructions.
    """
    if request.instructions is not None:
        messages = [ChatMessage(role="system", content=request.instructions), *messages]
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SHARED}
    known = ChatCompletionRequest.__struct_fields__
    return ChatCompletionRequest(
        **{name: value for name, value in fields.items() if name in known},
        messages=list(messages),
        max_tokens=request.max_output_tokens,
        logprobs=wants_logprobs(request) or None,
        top_logprobs=request.top_logprobs,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_tool_choice(request),
        response_format=_response_format(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )


def renamed(error: ApiError) -> ApiError:
    """Return an error of the chat endpoint with the field as it is called here."""
    name = (error.param or "").partition(".")[0]  # of `messages.0.role`, whose index is another
    if name in _NAMES:
        error.message = re.sub(rf"\b{name}\b", _NAMES[name], error.message)
        error.param = _NAMES[name]
    return error


def input_messages(request: ResponseRequest) -> list[ChatMessage]:
    """Return the input as messages of a conversation.

    Raises: ApiError naming the item that is none.
    """
    if isinstance(request.input, str):
        return [ChatMessage(role="user", content=request.input)]
    messages: list[ChatMessage] = []
    for index, item in enumerate(request.input):
        _add_item(messages, item, f"input.{index}")
    return messages


def output_messages(output: Sequence[Item]) -> list[ChatMessage]:
    """Return the items of an answer as messages of a conversation."""
    items = [msgspec.convert(msgspec.to_builtins(item), InputItem) for item in output]
    messages: list[ChatMessage] = []
    for item in items:
        _add_item(messages, item, "output")
    return messages


def _add_item(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Append an item: what the model says in a row is one message with thoughts and calls."""
    kind = item.type or "message"
    match kind:
        case "message":
            if item.role is None:
                raise ApiError(f"{where}.role: Field required.", param=f"{where}.role")
            last = messages[-1] if messages else None
            if item.role == "assistant" and last is not None and _is_open(last):
                last.content = _content(item.content, f"{where}.content")
            else:
                content = _content(item.content, f"{where}.content")
                messages.append(ChatMessage(role=item.role, content=content))
        case "function_call":
            if item.call_id is None or item.name is None or item.arguments is None:
                raise ApiError(
                    f"{where} must have call_id, name and arguments: it is a function_call.",
                    param=where,
                )
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _assistant(messages).tool_calls = [*(_assistant(messages).tool_calls or ()), call]
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise ApiError(
                    f"{where} must have call_id and output: it is a function_call_output.",
                    param=where,
                )
            content = _content(item.output, f"{where}.output")
            messages.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else item.summary or []
            thought = "\n".join(part.text or "" for part in parts)
            if thought:
                messages.append(ChatMessage(role="assistant", reasoning=thought))
        case _:
            raise ApiError(
                f"{where}.type {kind[:80]!r} is not supported; send message, function_call, "
                "function_call_output or reasoning.",
                param=f"{where}.type",
            )


def _is_open(message: ChatMessage) -> bool:
    """Return whether it is a thought that waits for what was said."""
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    """Return the model's message that ends the conversation, a new one if it does not."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _content(
    content: str | list[InputPart] | None, where: str
) -> str | list[ContentPart | str] | None:
    if content is None or isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.text is None and part.refusal is None:
            raise ApiError(
                f"{where}.{index} of type {part.type[:80]!r} is not supported; send text.",
                param=f"{where}.{index}",
            )
    texts = [part.text if part.text is not None else part.refusal for part in content]
    return [ContentPart(type="text", text=text) for text in texts]


def _tool(tool: JsonObject) -> JsonObject:
    """Return a tool in the chat endpoint's shape."""
    if tool.get("type") != "function":
        raise ApiError(
            f"tools of type {str(tool.get('type'))[:80]!r} are not supported; send functions.",
            param="tools",
        )
    if "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(request: ResponseRequest) -> str | JsonObject | None:
    choice = request.tool_choice
    if not request.tools and choice in ("none", "auto"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(request: ResponseRequest) -> JsonObject | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema is None:
        raise ApiError("text.format.schema: Field required.", param="text.format.schema")
    named = {
        "name": wanted.name,
        "schema": wanted.schema,
        "strict": wanted.strict,
        "description": wanted.description,
    }
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in named.items() if value is not None},
    }
