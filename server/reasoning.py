"""What a model thinks before it answers, told apart from the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from paged.server.tool_parsers import harmony
from paged.server.tool_parsers.events import Content, Event, Reasoning, TextParser
from paged.server.tool_parsers.framed import SPACES, overlap
from paged.server.tool_parsers.grammar import rules_up_to, spell
from paged.server.tool_parsers.harmony import HarmonyParser


class ReasoningFormat(Protocol):
    """How a family of models writes its reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """In the text; where one is a special token, special tokens have to stay in the text."""

    def state_after(self, prompt: str | None, *, is_continued: bool = False) -> "ReasoningState":
        """Return where an answer begins.

        Args:
          prompt: what the answer follows on, None if it is not known; a template may open the
            reasoning there, or close it at once.
          is_continued: the prompt ends within a message that the answer goes on with.
        """

    def rules(
        self, state: "ReasoningState", mark_ids: Mapping[str, int], *, before_calls: bool = False
    ) -> list[str]:
        """Return grammar rules of the reasoning that a constrained answer follows on.

        The first is `prefix`; there are none if there is no reasoning. The model decides whether
        it reasons where neither prompt nor format do.

        Args:
          state: where the answer begins.
          mark_ids: ids of the marks that are tokens.
          before_calls: calls follow, and not the answer itself.
        """

    def parser(self, state: "ReasoningState", *, reads_calls: bool) -> TextParser:
        """Return the parser of one sample.

        Args:
          state: where it begins.
          reads_calls: report calls that are part of the same format.
        """


@dataclass(frozen=True, slots=True)
class MarkedReasoning:
    """Reasoning between two marks, before the answer (see `ReasoningFormat`).

    Attributes:
      start, end: the marks.
      is_implied: the text begins within the reasoning, the start mark may be missing.
    """

    start: str
    end: str
    is_implied: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Both of them."""
        return self.start, self.end

    def state_after(self, prompt: str | None, *, is_continued: bool = False) -> "ReasoningState":
        """Return where an answer begins."""
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

    def rules(
        self, state: "ReasoningState", mark_ids: Mapping[str, int], *, before_calls: bool = False
    ) -> list[str]:
        """Return grammar rules of the reasoning."""
        if state is ReasoningState.ANSWER:
            return []
        start = spell(self.start, mark_ids)
        is_free = state is ReasoningState.UNDECIDED
        prefix = f"({start} thought GAP)?" if is_free else f"{start}? thought GAP"
        thought = rules_up_to("thought", self.end, mark_ids)
        return [f"prefix: {prefix}", *thought, r"GAP: /\n{0,2}/"]

    def parser(self, state: "ReasoningState", *, reads_calls: bool) -> TextParser:
        """Return the parser of one sample; calls are for another parser to find."""
        return ReasoningParser(self, state)


class HarmonyReasoning:
    """gpt-oss's channels (see `ReasoningFormat`); the prompt opens none of them."""

    marks = harmony.MARKS

    def state_after(self, prompt: str | None, *, is_continued: bool = False) -> "ReasoningState":
        """Return where an answer begins."""
        return ReasoningState.UNDECIDED

    def rules(
        self, state: "ReasoningState", mark_ids: Mapping[str, int], *, before_calls: bool = False
    ) -> list[str]:
        """Return grammar rules of the reasoning, and of the answer's own header."""
        thinks = spell(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", mark_ids)
        goes_on = spell(f"{harmony.START}assistant", mark_ids)
        final = spell(f"{harmony.CHANNEL}final{harmony.MESSAGE}", mark_ids)
        prefix = f"({thinks} thought {goes_on})?" + ("" if before_calls else f" {final}")
        return [f"prefix: {prefix}", *rules_up_to("thought", "<|end|>", mark_ids)]

    def parser(self, state: "ReasoningState", *, reads_calls: bool) -> TextParser:
        """Return the parser of one sample, calls included."""
        return HarmonyParser(reads_calls=reads_calls)


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

    def __init__(self, format: MarkedReasoning, state: ReasoningState) -> None:
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


HARMONY_REASONING = "openai_gptoss"

_THINK = MarkedReasoning("<think>", "</think>")
_IMPLIED_THINK = MarkedReasoning("<think>", "</think>", is_implied=True)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "glm45": _THINK,
    "deepseek_r1": _IMPLIED_THINK,
    HARMONY_REASONING: HarmonyReasoning(),
    "mistral": MarkedReasoning("[THINK]", "[/THINK]"),
}
"""Values of --reasoning-parser, with vLLM's names."""


def detect_reasoning_format(template: str) -> str | None:
    """Return the name of the format whose marks a chat template mentions, if one is known."""
    if all(mark in template for mark in (harmony.CHANNEL, harmony.MESSAGE)):
        return HARMONY_REASONING
    if "[THINK]" in template:
        return "mistral"
    return "qwen3" if "</think>" in template else None
