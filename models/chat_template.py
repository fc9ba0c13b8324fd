"""`ChatTemplate`: conversations to prompt text, with the Jinja template of a checkpoint.

Templates run in Jinja's sandbox and see what Hugging Face's `apply_chat_template` gives them. The
messages are brought into the form they expect first: see `ChatTemplate.render`.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_SECONDS = 5.0
"""Longest time a template may produce output, looked at between two pieces of it."""

# Appended to a message that is to be continued, to find its end in the prompt. The tab shows
# whether the template strips messages; the private-use characters keep it apart from any text.
_END_MARK = "\ue0a2END\ue0a2\t"


class ChatTemplateError(ValueError):
    """A conversation cannot be rendered; one line that has the template's own words."""


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: Jinja source.
      bos_token, eos_token: given to the template under these names; None gives nothing.
      content_format: see the attribute; None finds out.

    Attributes:
      source: Jinja source.
      content_format: "openai" if the template loops over the parts of a message's content,
        "string" if it wants plain text.

    Raises:
      ChatTemplateError: if the source is no valid template.

    Source: `render_jinja_template` in Hugging Face transformers, utils/chat_template_utils.py;
      the content formats are vLLM's.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        content_format: Literal["openai", "string"] | None = None,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.content_format = content_format or _content_format(tree)
            self._keeps_none = _tests_content_for_none(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"The chat template has an error in line {error.lineno}: {error.message}"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation; it holds all special tokens it needs.

        Before rendering, fields that are None are dropped, content parts become one text (joined
        by newlines) or stay a list of text parts, as the template wants it, tool-call arguments
        given as JSON text become objects, and if the template does not know the role "developer",
        such messages and the system's are merged into one system message in front.

        Args:
          messages: OpenAI chat messages.
          add_generation_prompt: end with the start of an assistant's message.
          continue_final_message: end within the last message, for the model to go on with it.
          tools: OpenAI tool definitions.
          **template_kwargs: further variables of the template.

        Raises:
          ChatTemplateError: if the template refuses the messages or fails on them.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other; set one of "
                "them to false."
            )
        if "messages" in template_kwargs:
            raise ChatTemplateError("'messages' cannot be set as a variable of the chat template.")
        rows = [_Message(index, message) for index, message in enumerate(messages)]
        if "developer" not in self.source:
            rows = _merge_system_messages(rows)
        final_text = _mark_end(rows) if continue_final_message else ""
        text = self._run(
            {
                **self._tokens,
                "tools": tools,
                **template_kwargs,
                "messages": [self._finish(row) for row in rows],
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text, final_text) if continue_final_message else text

    def _finish(self, row: "_Message") -> dict[str, Any]:
        """Give a message's content the form that the template wants."""
        content: Any
        if row.texts is None and self._keeps_none:
            content = None
        elif self.content_format == "openai":
            content = [{"type": "text", "text": text} for text in row.texts or ()]
        else:
            content = "\n".join(row.texts or ())
        return {**row.fields, "role": row.role, "content": content}

    def _run(self, variables: dict[str, Any]) -> str:
        pieces = []
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                if time.monotonic() > deadline:
                    raise ChatTemplateError(
                        f"The chat template took longer than {MAX_RENDER_SECONDS:g} seconds."
                    )
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"Chat template: {_one_line(error)}") from None
        except Exception as error:  # a template is a program: it may fail in any way
            kind = type(error).__name__
            raise ChatTemplateError(f"Chat template: {kind}: {_one_line(error)}") from None
        return "".join(pieces)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# --- messages ----------------------------------------------------------------------------------


_TEXT_FIELDS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts that are text, and the field that it stands in; as in vLLM's `chat_utils.py`."""


class _Message:
    """One message with its content taken apart: `texts` is None where there is none."""

    def __init__(self, index: int, message: Mapping[str, Any]) -> None:
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"messages[{index}] has no role.")
        self.role: str = message["role"]
        self.texts = _texts(index, message.get("content"))
        self.fields = {
            key: value
            for key, value in message.items()
            if value is not None and key not in ("role", "content", "tool_calls")
        }
        if calls := message.get("tool_calls"):
            self.fields["tool_calls"] = [_with_object_arguments(index, call) for call in calls]


def _texts(index: int, content: Any) -> list[str] | None:
    if content is None:
        return None
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Iterable):
        raise ChatTemplateError(f"messages[{index}].content must be text or a list of parts.")
    return [_text_of_part(index, part) for part in content]


def _text_of_part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, Mapping) else {}
    kind = fields.get("type")
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    text = fields.get(field)
    if not isinstance(text, str):
        rule = "only text is supported" if field is None else f"its text must stand in {field!r}"
        raise ChatTemplateError(f"messages[{index}].content has a part of type {kind!r}; {rule}.")
    return text


def _with_object_arguments(index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates want them, not JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ChatTemplateError(
                f"messages[{index}].tool_calls has arguments that are no JSON: {arguments[:80]!r}."
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _merge_system_messages(rows: list[_Message]) -> list[_Message]:
    """Return the messages with those of developers and the system as one system message in front.

    Left alone where there is no developer: most templates want at most one system message, the
    first, but what they do with others is theirs to say.
    """
    if all(row.role != "developer" for row in rows):
        return rows
    merged = [row for row in rows if row.role in ("developer", "system")]
    texts = ["\n".join(row.texts or ()) for row in merged]
    system = _Message(0, {"role": "system", "content": "\n\n".join(filter(None, texts))})
    return [system, *(row for row in rows if row not in merged)]


def _mark_end(rows: list[_Message]) -> str:
    """Append the end mark to the last message; return its text without."""
    if not rows or not rows[-1].texts:
        raise ChatTemplateError("continue_final_message needs a last message with text.")
    texts = rows[-1].texts
    final_text = texts[-1]
    texts[-1] += _END_MARK
    return final_text


def _cut_at_mark(text: str, final_text: str) -> str:
    """Return the prompt up to the end of the marked message."""
    bare_mark = _END_MARK.strip()
    end = text.rfind(bare_mark)
    if end < 0 or final_text.strip() not in text[:end]:
        raise ChatTemplateError(
            "continue_final_message is set, but the chat template does not keep the text of the "
            "last message."
        )
    keeps_spaces = text.startswith(_END_MARK, end)
    return text[:end] if keeps_spaces else text[:end].rstrip()


# --- what templates can use --------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks what to train on; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (read by Jinja as a class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


# --- what a template wants ---------------------------------------------------------------------


def _content_format(tree: jinja2.nodes.Template) -> Literal["openai", "string"]:
    names = _content_names(tree)
    loops = tree.find_all(jinja2.nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _tests_content_for_none(tree: jinja2.nodes.Template) -> bool:
    names = _content_names(tree)
    tests = tree.find_all(jinja2.nodes.Test)
    return any(test.name == "none" and _is_content(test.node, names) for test in tests)


def _content_names(tree: jinja2.nodes.Template) -> set[str]:
    """Names that stand for a message's content: "content" itself, and what is set to it."""
    names = {"content"}
    for assignment in tree.find_all(jinja2.nodes.Assign):
        target = assignment.target
        if isinstance(target, jinja2.nodes.Name) and _is_content(assignment.node, names):
            names.add(target.name)
    return names


def _is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    """Whether an expression is `x.content`, `x["content"]` or one of `names`, filtered or not."""
    while isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names
