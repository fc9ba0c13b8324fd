"""The formats by name, and which of them a chat template teaches its model."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from paged.server.tool_parsers import harmony
from paged.server.tool_parsers.events import PlainText, TextParser
from paged.server.tool_parsers.framed import Frame, FramedCalls
from paged.server.tool_parsers.grammar import CallForm
from paged.server.tool_parsers.mistral import ARGUMENTS_MARK, FRAME, MistralCalls
from paged.server.tool_parsers.pythonic import END_MARK, START_MARK, PythonicCalls

HARMONY = "openai"
"""The name of gpt-oss's format, in which calls and reasoning are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
      make_parser: from the names of the functions that count as calls without a mark.
      marks: in the text; where one is a special token, special tokens have to stay in the text.
      forms: what a grammar demands where a call is required, by a mark that the vocabulary has to
        hold; "" is for the others.
      is_single: an answer ends with its first call.
      has_short_ids: ids of calls are nine letters or digits, which the templates insist on.
    """

    make_parser: Callable[[Collection[str]], TextParser]
    marks: tuple[str, ...] = ()
    forms: Mapping[str, CallForm]
    is_single: bool = False
    has_short_ids: bool = False


# Without its marks, too: Qwen2.5-Coder, whose template asks for them, mostly leaves them out.
_HERMES = Frame(
    mark="<tool_call>", closing="</tool_call>", starts_bare=True, fence=("```json", "```")
)
_LLAMA3 = Frame(mark="<|python_tag|>", separator=";", starts_bare=True)
_LIST = Frame(mark="", opening="[", separator=",", closing="]", starts_bare=True)

_LIST_FORM = CallForm(
    begin="[",
    before_name='{"name": "',
    after_name='", "parameters": ',
    after_arguments="}",
    separator=", ",
    end="]",
)

JSON_LIST = ToolFormat(
    make_parser=lambda names: FramedCalls(_LIST, names),
    forms={"": _LIST_FORM},
)
"""A JSON list of calls: for models of which no format is known, and demanded by a grammar."""

_HERMES_FORMAT = ToolFormat(
    make_parser=lambda names: FramedCalls(_HERMES, names),
    marks=("<tool_call>", "</tool_call>"),
    forms={
        "": CallForm(
            mark="<tool_call>",
            before_name='<tool_call>\n{"name": "',
            after_name='", "arguments": ',
            after_arguments="}\n</tool_call>",
            separator="\n",
        )
    },
)
_LLAMA3_FORMAT = ToolFormat(
    make_parser=lambda names: FramedCalls(_LLAMA3, names),
    marks=("<|python_tag|>",),
    forms={
        "": CallForm(
            before_name='{"name": "',
            after_name='", "parameters": ',
            after_arguments="}",
            separator="; ",
            plain_text=r"\s*([^{\s](?s:.*))?",
        )
    },
)
_MISTRAL_FORMAT = ToolFormat(
    make_parser=lambda names: MistralCalls(FRAME, names),
    marks=("[TOOL_CALLS]", ARGUMENTS_MARK, "[CALL_ID]"),
    forms={
        ARGUMENTS_MARK: CallForm(
            mark="[TOOL_CALLS]", before_name="[TOOL_CALLS]", after_name=ARGUMENTS_MARK
        ),
        "": CallForm(
            mark="[TOOL_CALLS]",
            begin="[TOOL_CALLS][",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            separator=", ",
            end="]",
        ),
    },
    has_short_ids=True,
)
# JSON schemas are no rules for Python's syntax: where a call is required, it is a list in JSON.
_PYTHONIC_FORMAT = ToolFormat(
    make_parser=PythonicCalls,
    marks=(START_MARK, END_MARK),
    forms={},
)

# Its calls are told apart together with the reasoning, by the reasoning's parser.
_HARMONY_FORMAT = ToolFormat(
    make_parser=lambda names: PlainText(),
    marks=harmony.MARKS,
    forms={
        "": CallForm(
            before_name=f"{harmony.CHANNEL}commentary to=functions.",
            after_name=f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
            plain_begin=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
            plain_text="(?s:.*)",
        )
    },
    is_single=True,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES_FORMAT,
    "qwen": _HERMES_FORMAT,
    "llama3_json": _LLAMA3_FORMAT,
    "llama4_json": _LLAMA3_FORMAT,
    "mistral": _MISTRAL_FORMAT,
    "pythonic": _PYTHONIC_FORMAT,
    "llama4_pythonic": _PYTHONIC_FORMAT,
    "olmo3": _PYTHONIC_FORMAT,
    HARMONY: _HARMONY_FORMAT,
}
"""Values of --tool-call-parser; the names are vLLM's, but for "qwen"."""


def detect_tool_format(template: str) -> str | None:
    """Return the name of the format that a chat template's own words describe, if one is known."""
    if "tools" not in template:
        return None
    if all(mark in template for mark in (harmony.CHANNEL, harmony.MESSAGE)):
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        # Not Qwen3-Coder's <function=...>, nor GLM's <arg_key>.
        is_json = '"arguments"' in template or '\\"arguments\\"' in template
        return "hermes" if is_json and "<function=" not in template else None
    if '{"name": function name, "parameters":' in template:
        return "llama3_json"
    if "[func_name1(params_name1=params_value1" in template:
        return "pythonic"
    return None
