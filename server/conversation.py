"""From the messages of a conversation to the text that the chat template makes of them."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec

from paged.server.context import ServerContext, make_chat_template
from paged.server.errors import ApiError
from paged.server.protocol import ChatCompletionRequest, ChatMessage

if TYPE_CHECKING:
    from paged.models.chat_template import ChatTemplate

# Variables that the request sets through fields of its own.
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


async def render_chat(context: ServerContext, request: ChatCompletionRequest) -> str:
    """Return the prompt text of a conversation.

    Raises: ApiError if there is no template, or it refuses the messages.
    """
    if request.chat_template is None:
        return _render(context, request)
    # A stranger's program: on a thread it cannot hold up the other requests while it runs.
    return await asyncio.to_thread(_render, context, request)


def text_of(message: ChatMessage) -> str:
    """Return a message's content as one string, its parts joined by newlines."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(
        part if isinstance(part, str) else part.text or part.refusal or part.thinking or ""
        for part in message.content
    )


def _render(context: ServerContext, request: ChatCompletionRequest) -> str:
    try:
        return _template_for(context, request).render(
            [_as_mapping(index, message) for index, message in enumerate(request.messages)],
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            tools=_shown_tools(context, request),
            **{**context.settings.default_chat_template_kwargs, **_variables(request)},
        )
    except RecursionError:
        raise ApiError("The messages are nested too deeply.", param="messages") from None
    except ValueError as error:
        raise ApiError(str(error)) from None


def _template_for(context: ServerContext, request: ChatCompletionRequest) -> "ChatTemplate":
    if request.chat_template is not None:
        if not context.settings.trust_request_chat_template:
            raise ApiError(
                "chat_template is not accepted from requests; start the server with "
                "--trust-request-chat-template to allow it.",
                param="chat_template",
            )
        try:
            return make_chat_template(context.engine, context.settings, request.chat_template)
        except ValueError as error:
            raise ApiError(str(error), param="chat_template") from None
    template = context.chat_template or context.engine.checkpoint.chat_template
    if template is None:
        raise ApiError(
            "The model has no chat template; use /v1/completions, or start the server with "
            "--chat-template.",
            param="messages",
        )
    return template


def _shown_tools(
    context: ServerContext, request: ChatCompletionRequest
) -> list[dict[str, Any]] | None:
    """Return the tools that the model gets to see."""
    is_left_out = context.settings.exclude_tools_when_tool_choice_none
    return None if is_left_out and request.tool_choice == "none" else request.tools


def _as_mapping(index: int, message: ChatMessage) -> dict[str, Any]:
    for number, call in enumerate(message.tool_calls or ()):
        _check_arguments(call, f"messages.{index}.tool_calls.{number}.function.arguments")
    mapping: dict[str, Any] = msgspec.to_builtins(message)
    reasoning = message.reasoning or message.reasoning_content
    # Both spellings are in use among templates.
    return {**mapping, "reasoning": reasoning, "reasoning_content": reasoning}


def _check_arguments(call: dict[str, Any], where: str) -> None:
    """Refuse arguments of an earlier call that the template cannot be given as an object."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not arguments or isinstance(arguments, dict):
        return
    try:
        if isinstance(json.loads(arguments), dict):
            return
    except (TypeError, ValueError, RecursionError):
        pass
    raise ApiError(
        f"{where} must be the JSON text of an object, got {str(arguments)[:80]!r}.", param=where
    )


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """Return the further variables that the template sees."""
    variables: dict[str, Any] = {}
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables["enable_thinking"] = request.reasoning_effort != "none"
    given = request.chat_template_kwargs or {}
    if reserved := sorted(_RESERVED_VARIABLES & given.keys()):
        raise ApiError(
            f"chat_template_kwargs must not hold {', '.join(reserved)}; use the request's own "
            "field.",
            param="chat_template_kwargs",
        )
    return {**variables, **given}
