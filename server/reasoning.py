"""What a model thinks before it answers, told apart from the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from paged.server.tool_parsers.events import Content, Event, Reasoning
from paged.server.tool_parsers.framed import SPACES, overlap
from paged.server.tool_parsers.grammar import spell, text_without


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

    def state_after(self, prompt: str | None, *, is_continued: bool = False) -> "ReasoningState":
        """Return where an answer begins.

        Args:
          prompt: what the answer follows on, None if it is not known; a template may open the
            reasoning there, or close it at once.
          is_continued: the prompt ends within a message that the answer goes on with.
        """
        prompt = prompt or ""
        tail = prompt.rstrip(SPACES)
        if tail.endswith(self.end):
            return ReasoningState.ANSWER
        if tail.endswith(self.start):
            return ReasoningState.REASONING
        if is_continued:
            is_open = prompt.rfind(self.start) > prompt.rfind(self.end)
            return ReasoningState.REASONING if is_open else ReasoningState.ANSWER
        return ReasoningState.IMPLIED if self.is_implied else ReasoningState.UNDECIDED

    def rules(self, state: "ReasoningState", mark_ids: Mapping[str, int]) -> list[str]:
        """Return grammar rules of the reasoning that a constrained answer follows on.

        The first is `prefix`; there are none if there is no reasoning. The model decides whether
        it reasons where neither prompt nor format do.
        """
        if state is ReasoningState.ANSWER:
            return []
        start, end = spell(self.start, mark_ids), spell(self.end, mark_ids)
        is_free = state is ReasoningState.UNDECIDED
        prefix = f"({start} THOUGHT {end} GAP)?" if is_free else f"{start}? THOUGHT {end} GAP"
        return [f"prefix: {prefix}", f"THOUGHT: {text_without(self.end)}", r"GAP: /\n{0,2}/"]


class ReasoningState(Enum):
    """Where a text stands."""

    UNDECIDED = auto()  # nothing but whitespace so far: the start mark makes it reasoning
    IMPLIED = auto()  # the same, but it is reasoning without it, too
    REASONING = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits a text into reasoning and answer (mutable; see `TextParser`).

    The text of both stays as it is, less the marks. Without an end mark all is reasoning.

    Args:
      format: the marks.
      state: where the text begins; see `ReasoningFormat.state_after`.
    """

    def __init__(self, format: ReasoningFormat, state: ReasoningState) -> None:
        self._format = format
        self._state = state
        self._pending = ""

    def feed(self, text: str) -> list[Event]:
        """Return what more text decides."""
        return self._read(text, is_over=False)

    def finish(self) -> list[Event]:
        """Return what was held back, when no text follows."""
        return self._read("", is_over=True)

    def _read(self, text: str, *, is_over: bool) -> list[Event]:
        self._pending += text
        if self._state in (ReasoningState.UNDECIDED, ReasoningState.IMPLIED):
            self._decide(is_over)
        events: list[Event] = []
        if self._state is ReasoningState.REASONING:
            thought = self._take_reasoning(is_over)
            events += [Reasoning(thought)] if thought else []
        if self._state is ReasoningState.ANSWER and self._pending:
            events.append(Content(self._pending))
            self._pending = ""
        return events

    def _decide(self, is_over: bool) -> None:
        start = self._format.start
        text = self._pending.lstrip(SPACES)
        if text.startswith(start):
            self._pending = text[len(start) :]
            self._state = ReasoningState.REASONING
        elif is_over or not start.startswith(text):
            is_implied = self._state is ReasoningState.IMPLIED
            self._state = ReasoningState.REASONING if is_implied else ReasoningState.ANSWER

    def _take_reasoning(self, is_over: bool) -> str:
        end = self._format.end
        thought, mark, rest = self._pending.partition(end)
        if mark:
            self._state = ReasoningState.ANSWER
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
