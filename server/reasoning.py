"""What a model thinks before it answers, told apart from the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from paged.server.tool_parsers.events import Content, Event, Reasoning
from paged.server.tool_parsers.framed import SPACES, overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning.

    Attributes:
      start, end: the marks.
      is_implied: the text begins within the reasoning, the start mark may be missing.
    """

    start: str
    end: str
    is_implied: bool = False

    def parser(self, prompt: str | None, *, is_continued: bool = False) -> "ReasoningParser":
        """Return the parser of an answer.

        Args:
          prompt: what the answer follows on, None if it is not known; a template may open the
            reasoning there, or close it at once.
          is_continued: the prompt ends within a message that the answer goes on with.
        """
        return ReasoningParser(self, self._state_after(prompt or "", is_continued))

    def may_reason(self, prompt: str | None, *, is_continued: bool = False) -> bool:
        """Whether an answer to this prompt may begin with reasoning."""
        return self._state_after(prompt or "", is_continued) is not _State.ANSWER

    def _state_after(self, prompt: str, is_continued: bool) -> "_State":
        tail = prompt.rstrip(SPACES)
        if tail.endswith(self.end):
            return _State.ANSWER
        if tail.endswith(self.start):
            return _State.REASONING
        if is_continued:
            opened, closed = prompt.rfind(self.start), prompt.rfind(self.end)
            return _State.REASONING if opened > closed else _State.ANSWER
        return _State.IMPLIED if self.is_implied else _State.UNDECIDED


class _State(Enum):
    UNDECIDED = auto()  # nothing but whitespace so far: the start mark makes it reasoning
    IMPLIED = auto()  # the same, but it is reasoning without it, too
    REASONING = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits a text into reasoning and answer (mutable; see `TextParser`).

    The text of both stays as it is, less the marks. Without an end mark all is reasoning.

    Args:
      format: the marks.
      state: where the text begins; see `ReasoningFormat.parser`.

    Attributes:
      in_answer: the reasoning has ended, or there was none.
    """

    def __init__(self, format: ReasoningFormat, state: _State) -> None:
        self._format = format
        self._state = state
        self._pending = ""

    @property
    def in_answer(self) -> bool:
        """Whether what follows is the answer."""
        return self._state is _State.ANSWER

    def feed(self, text: str) -> list[Event]:
        """Return what more text decides."""
        return self._read(text, is_over=False)

    def finish(self) -> list[Event]:
        """Return what was held back, when no text follows."""
        return self._read("", is_over=True)

    def _read(self, text: str, *, is_over: bool) -> list[Event]:
        self._pending += text
        if self._state in (_State.UNDECIDED, _State.IMPLIED):
            self._decide(is_over)
        events: list[Event] = []
        if self._state is _State.REASONING:
            thought = self._take_reasoning(is_over)
            events += [Reasoning(thought)] if thought else []
        if self._state is _State.ANSWER and self._pending:
            events.append(Content(self._pending))
            self._pending = ""
        return events

    def _decide(self, is_over: bool) -> None:
        start = self._format.start
        text = self._pending.lstrip(SPACES)
        if text.startswith(start):
            self._pending = text[len(start) :]
            self._state = _State.REASONING
        elif is_over or not start.startswith(text):
            is_implied = self._state is _State.IMPLIED
            self._state = _State.REASONING if is_implied else _State.ANSWER

    def _take_reasoning(self, is_over: bool) -> str:
        end = self._format.end
        thought, mark, rest = self._pending.partition(end)
        if mark:
            self._state = _State.ANSWER
        elif not is_over:
            held = overlap(thought, end)
            thought, rest = thought[: len(thought) - held], thought[len(thought) - held :]
        self._pending = rest
        return thought


_THINK = ReasoningFormat("<think>", "</think>")
_IMPLIED_THINK = ReasoningFormat("<think>", "</think>", is_implied=True)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "glm45": _THINK,
    "deepseek_r1": _IMPLIED_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""Values of --reasoning-parser, with vLLM's names."""


def detect_reasoning_format(template: str) -> str | None:
    """Return the name of the format whose marks a chat template mentions, if one is known."""
    if "[THINK]" in template:
        return "mistral"
    return "qwen3" if "</think>" in template else None
