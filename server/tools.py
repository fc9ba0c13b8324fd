"""What a request says about tools: which there are, whether one is to be called, and how."""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from paged.scheduler.structured.params import StructuredOutputs
from paged.server.context import ServerContext
from paged.server.errors import SCHEMA_ERROR, ApiError
from paged.server.protocol import ChatCompletionRequest
from paged.server.tool_parsers.events import TextParser
from paged.server.tool_parsers.formats import JSON_LIST, ToolFormat
from paged.server.tool_parsers.grammar import (
    CallForm,
    Function,
    argument_schemas,
    call_grammar,
    free_text_grammar,
)

_ID_CHARACTERS = string.ascii_letters + string.digits
_CHOICES = ("none", "auto", "required")
# Of a function without parameters, as OpenAI reads it.
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class _FunctionFields(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolFields(Struct):
    type: Literal["function"]
    function: _FunctionFields


class _NamedFunction(Struct):
    name: str


class _NamedChoice(Struct):
    type: Literal["function"]
    function: _NamedFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How the calls in an answer are read.

    Attributes:
      make_parser: of one sample's text.
      structured_outputs: leaves the model nothing but calls, or but right ones; None: its own will.
      is_forced: the answer is nothing but calls; of one that was cut, what is left over behind
        them is no content.
      is_single: calls after the first are dropped.
      finish_reason: instead of "stop", for an answer with calls.
      make_id: of a call.
      keeps_special_tokens: the marks of the format are special tokens.
    """

    make_parser: Callable[[], TextParser]
    structured_outputs: StructuredOutputs | None
    is_forced: bool
    is_single: bool
    finish_reason: str
    make_id: Callable[[], str]
    keeps_special_tokens: bool


def check_tools(request: ChatCompletionRequest) -> None:
    """Refuse tools and choices that contradict each other or say nothing.

    Raises: ApiError naming the field.
    """
    if request.tools is not None and not request.tools:
        raise ApiError("tools must not be empty; leave it out.", param="tools")
    if request.tool_choice not in (None, "none") and request.tools is None:
        raise ApiError("tool_choice needs tools; send both or neither.", param="tool_choice")
    names = [tool.function.name for tool in _tools(request)]
    chosen = _chosen_name(request)
    if chosen is not None and chosen not in names:
        raise ApiError(
            f"tool_choice names {chosen!r}, but tools has only {', '.join(names)}.",
            param="tool_choice",
        )


def tool_use(
    context: ServerContext, request: ChatCompletionRequest, prefix: Sequence[str]
) -> ToolUse | None:
    """Return how the calls of an answer are read, None if there can be none.

    Args:
      context: of the application.
      request: that `check_tools` has let through.
      prefix: grammar rules of what precedes the calls (`ReasoningFormat.rules`).

    Raises: ApiError if the server is not set up for what the request asks.
    """
    if request.tools is None or request.tool_choice == "none":
        return None
    tools = _tools(request)
    chosen = _chosen_name(request)
    is_forced = chosen is not None or request.tool_choice == "required"
    format = context.tool_format
    if not is_forced and not (format is not None and context.auto_tool_choice):
        raise ApiError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be '
            'set; or send tool_choice "none" or "required".',
            param="tool_choice",
        )
    if is_forced and (field := _constraint(request)):
        raise ApiError(f"tool_choice demands a call; leave out {field}.", param=field)
    if is_forced and (format is None or not format.forms):
        format = JSON_LIST
    assert format is not None
    names = {tool.function.name for tool in tools if chosen in (None, tool.function.name)}
    called = [tool for tool in tools if tool.function.name in names]
    is_single = chosen is not None or request.parallel_tool_calls is False or format.is_single
    grammar = _Grammar(context, format, called, prefix)
    constraint = grammar.forced(is_single) if is_forced else grammar.strict(request)
    # Without its mark a call would have escaped the grammar.
    bare_names = set() if constraint is not None and grammar.has_mark else names
    return ToolUse(
        make_parser=lambda: format.make_parser(bare_names),
        structured_outputs=constraint,
        is_forced=is_forced,
        is_single=is_single,
        finish_reason="stop" if chosen is not None else "tool_calls",
        make_id=_short_id if format.has_short_ids else _long_id,
        keeps_special_tokens=has_special(context, format.marks),
    )


def has_special(context: ServerContext, marks: Sequence[str]) -> bool:
    """Whether one of the marks is a special token of the model, left out of texts by default."""
    special = context.engine.tokenizer.special_ids
    return not special.isdisjoint(mark_ids(context, marks).values())


def mark_ids(context: ServerContext, marks: Sequence[str]) -> dict[str, int]:
    """Return the ids of those marks that are tokens of the model."""
    backend = context.engine.tokenizer.backend
    ids = {mark: backend.token_to_id(mark) for mark in marks}
    return {mark: token_id for mark, token_id in ids.items() if token_id is not None}


class _Grammar:
    """The grammars of one request's calls."""

    def __init__(
        self,
        context: ServerContext,
        format: ToolFormat,
        tools: Sequence[_ToolFields],
        prefix: Sequence[str],
    ) -> None:
        self._form = _form(context, format)
        self._tools = tools
        self._mark_ids = mark_ids(context, format.marks)
        self._prefix = prefix

    @property
    def has_mark(self) -> bool:
        """Whether calls are told from text by a mark."""
        return self._form is not None and bool(self._form.mark)

    def forced(self, is_single: bool) -> StructuredOutputs:
        """Return what leaves nothing but calls."""
        assert self._form is not None
        functions = [_function(tool) for tool in self._tools]
        text = call_grammar(
            self._form,
            functions,
            is_single=is_single,
            mark_ids=self._mark_ids,
            prefix=self._prefix,
        )
        return _with_arguments(text, functions)

    def strict(self, request: ChatCompletionRequest) -> StructuredOutputs | None:
        """Return what keeps calls of strict functions to their schemas, if there are any."""
        if not any(tool.function.strict for tool in self._tools):
            return None
        format = request.response_format
        is_formatted = format is not None and format.get("type") != "text"
        if field := "response_format" if is_formatted else _constraint(request):
            raise ApiError(
                f"Strict functions and {field} exclude each other; leave out one of them.",
                param=field,
            )
        if self._form is None or not (self._form.mark or self._form.plain_text):
            raise ApiError(
                'strict functions need tool_choice "required" with this model: nothing but '
                "their names tells its calls from text.",
                param="tools",
            )
        functions = [_function(tool, only_strict=True) for tool in self._tools]
        text = free_text_grammar(
            self._form, functions, mark_ids=self._mark_ids, prefix=self._prefix
        )
        return _with_arguments(text, functions)


def _with_arguments(grammar: str, functions: Sequence[Function]) -> StructuredOutputs:
    """Return the constraint of a grammar of calls, arguments spaced as templates space them."""
    return StructuredOutputs(
        grammar=grammar,
        schemas=argument_schemas(functions),
        disable_any_whitespace=True,
        spaces_json=True,
        source="tools",
    )


def _constraint(request: ChatCompletionRequest) -> str | None:
    """Return the field that says what the answer as a whole must look like, if there is one."""
    fields = ("structured_outputs", "guided_json", "guided_regex", "guided_choice")
    given = [f for f in (*fields, "guided_grammar") if getattr(request, f) is not None]
    return given[0] if given else None


def _tools(request: ChatCompletionRequest) -> list[_ToolFields]:
    return [_tool(index, fields) for index, fields in enumerate(request.tools or ())]


def _tool(index: int, fields: dict[str, Any]) -> _ToolFields:
    try:
        tool = msgspec.convert(fields, _ToolFields)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        where = f"tools.{index}" + ("." + path.rstrip("`") if path else "")
        raise ApiError(f"{where}: {reason}.", type=SCHEMA_ERROR, param=f"body.{where}") from None
    if not tool.function.name:
        raise ApiError("The name of a function must not be empty.", param=f"tools.{index}")
    if not tool.function.name.isprintable():
        # Where it stands in a text, no parser would take it for a name (`CallObject`).
        raise ApiError(
            f"The name of a function must be printable, got {tool.function.name[:80]!r}.",
            param=f"tools.{index}",
        )
    if (tool.function.parameters or {}).get("type", "object") != "object":
        raise ApiError(
            f"The parameters of {tool.function.name!r} must be the schema of an object.",
            param=f"tools.{index}.function.parameters",
        )
    return tool


def _function(tool: _ToolFields, *, only_strict: bool = False) -> Function:
    parameters: Mapping[str, Any] | None = tool.function.parameters
    if only_strict and not tool.function.strict:
        parameters = {}
    elif parameters is None:
        parameters = _NO_PARAMETERS
    return Function(tool.function.name, {"type": "object", **parameters})


def _chosen_name(request: ChatCompletionRequest) -> str | None:
    """Return the function that has to be called, if the request names one."""
    choice = request.tool_choice
    if isinstance(choice, dict):
        try:
            return msgspec.convert(choice, _NamedChoice).function.name
        except msgspec.ValidationError:
            pass
    elif choice is None or choice in _CHOICES:
        return None
    raise ApiError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
        '{"name": ...}}.',
        param="tool_choice",
    )


def _form(context: ServerContext, format: ToolFormat) -> CallForm | None:
    """Return the form of a format that the model's vocabulary has the marks for."""
    backend = context.engine.tokenizer.backend
    marked = [
        form
        for mark, form in format.forms.items()
        if mark and backend.token_to_id(mark) is not None
    ]
    return marked[0] if marked else format.forms.get("")


def _long_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def _short_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
