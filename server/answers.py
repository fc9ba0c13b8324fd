"""From the text of a sample to a message: reasoning, content and tool calls, whole or in deltas."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged.scheduler.params import SamplingParams
from paged.server.constraints import after_reasoning
from paged.server.context import ServerContext
from paged.server.prompts import Prompt
from paged.server.protocol import ChatCompletionRequest
from paged.server.reasoning import ReasoningFormat, ReasoningState
from paged.server.text_codec import encode
from paged.server.tool_parsers.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    TextParser,
    joined,
)
from paged.server.tools import ToolUse, has_special, mark_ids, tool_use


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the texts of one request's samples are taken apart.

    Attributes:
      reasoning: marks of the reasoning, None if there is none to be found.
      state: where the texts begin.
      rules: grammar rules of the reasoning, for constraints of what follows on it.
      tools: how calls are read, None if there are none to be found.
      include_reasoning: hand out the reasoning; without, its tokens are not shown either.
      keeps_special_tokens: marks are special tokens, which have to stay in the text.
    """

    reasoning: ReasoningFormat | None
    state: ReasoningState
    rules: tuple[str, ...]
    tools: ToolUse | None
    include_reasoning: bool
    keeps_special_tokens: bool

    @property
    def hides_tokens(self) -> bool:
        """Whether ids and log probabilities would tell what is to be left out."""
        return self.reasoning is not None and not self.include_reasoning

    def adjusted(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that go with the format.

        Raises: ApiError for a constraint that cannot follow on reasoning.
        """
        changes: dict[str, Any] = {}
        if self.tools is not None and self.tools.structured_outputs is not None:
            changes["structured_outputs"] = self.tools.structured_outputs
        elif self.rules and params.structured_outputs is not None:
            constraint = after_reasoning(params.structured_outputs, self.rules)
            changes["structured_outputs"] = constraint
        if self.keeps_special_tokens:
            changes["skip_special_tokens"] = False
        return dataclasses.replace(params, **changes) if changes else params

    def reader(self) -> "AnswerReader":
        """Return what reads one sample."""
        return AnswerReader(self)


def answer_format(
    context: ServerContext, request: ChatCompletionRequest, prompt: Prompt
) -> AnswerFormat | None:
    """Return how the answers to a request are taken apart, None if they are plain text.

    Raises: ApiError if the server is not set up for what the request asks.
    """
    reasoning, state = context.reasoning_format, ReasoningState.ANSWER
    if reasoning is not None:
        is_continued = bool(request.continue_final_message)
        state = reasoning.state_after(prompt.text, is_continued=is_continued)
        if state is ReasoningState.ANSWER:
            reasoning = None
    marks: tuple[str, ...] = ()
    rules: Sequence[str] = ()
    rules_of_calls: Sequence[str] = ()
    if reasoning is not None:
        marks = reasoning.marks
        ids = mark_ids(context, marks)
        rules = reasoning.rules(state, ids)
        rules_of_calls = reasoning.rules(state, ids, before_calls=True)
    tools = tool_use(context, request, rules_of_calls)
    if reasoning is None and tools is None:
        return None
    return AnswerFormat(
        reasoning=reasoning,
        state=state,
        rules=tuple(rules),
        tools=tools,
        include_reasoning=request.include_reasoning is not False,
        keeps_special_tokens=has_special(context, marks)
        or (tools is not None and tools.keeps_special_tokens),
    )


class AnswerReader:
    """Reads one sample as it grows: its reasoning, then its calls (mutable; see `TextParser`).

    Attributes:
      format: how.
    """

    def __init__(self, format: AnswerFormat) -> None:
        self.format = format
        self._reasoning: TextParser | None = None
        if format.reasoning is not None:
            reads_calls = format.tools is not None
            self._reasoning = format.reasoning.parser(format.state, reads_calls=reads_calls)
        self._tools: TextParser | None = None
        if format.tools is not None:
            self._tools = format.tools.make_parser()
        self._has_calls = False
        self._thoughts: list[str] = []

    @property
    def thoughts(self) -> str:
        """The reasoning so far, also one that is not handed out."""
        return "".join(self._thoughts)

    def feed(self, text: str) -> list[Event]:
        """Return what more text decides."""
        events = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._read(events, is_over=False)

    def finish(self) -> list[Event]:
        """Return what was held back, when no text follows."""
        return self._read([] if self._reasoning is None else self._reasoning.finish(), is_over=True)

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the reason that the answer gives for one of the engine's.

        A sample that was cut says so, even if it has calls: the last one may be incomplete.
        """
        if reason == "stop" and self._has_calls and self.format.tools is not None:
            return self.format.tools.finish_reason
        return reason

    def make_id(self) -> str:
        """Return an id for a call."""
        assert self.format.tools is not None
        return self.format.tools.make_id()

    def _read(self, events: Iterable[Event], *, is_over: bool) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._tools is not None:
                result += self._tools.feed(event.text)
            else:
                result.append(event)
        if is_over and self._tools is not None:
            result += self._tools.finish()
        return joined([event for event in result if self._shows(event)])

    def _shows(self, event: Event) -> bool:
        tools = self.format.tools
        match event:
            case Reasoning(text):
                self._thoughts.append(text)
                return self.format.include_reasoning
            case CallStart(index) | CallArguments(index):
                self._has_calls = True
                return not (index and tools is not None and tools.is_single)
            case Content(text):
                is_rest = tools is not None and tools.is_forced and self._has_calls
                return bool(text) and not is_rest


async def count_reasoning_tokens(
    context: ServerContext, readers: Sequence[AnswerReader]
) -> int | None:
    """Return how many tokens the reasoning of samples takes, as the tokenizer spells its text.

    None where nobody looks for reasoning.
    """
    if context.reasoning_format is None:
        return None
    texts = [reader.thoughts for reader in readers]
    ids = await encode(context.engine.tokenizer, texts, add_special_tokens=False)
    return sum(map(len, ids))


def message_fields(events: Iterable[Event], make_id: Callable[[], str]) -> dict[str, Any]:
    """Return `content`, and `tool_calls` and the reasoning where there are any, of a message."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": make_id(), "type": "function", "function": function})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    fields: dict[str, Any] = {"content": content or (None if calls or reasoning else "")}
    if calls:
        fields["tool_calls"] = calls
    if reasoning:
        fields |= _reasoning_fields(reasoning)
    return fields


def delta_fields(event: Event, make_id: Callable[[], str]) -> Mapping[str, Any]:
    """Return the delta of an event."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning_fields(text)
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": make_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning_fields(text: str) -> dict[str, Any]:
    # The first is vLLM's name now; the second was, and is DeepSeek's: clients know either.
    return {"reasoning": text, "reasoning_content": text}
