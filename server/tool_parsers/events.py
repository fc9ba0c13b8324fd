"""What a parser reports of a model's text as it grows, and what a parser is."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are numbered from 0 and come one after another."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; joined they are the text of one JSON object."""

    index: int
    text: str


type Event = Content | Reasoning | CallStart | CallArguments


class TextParser(Protocol):
    """A state machine over the text of one sample (mutable).

    How the text is cut into pieces changes neither what the events say when they are joined nor
    their order. A call that was reported is never taken back: where its arguments turn out to be
    no JSON, or end too early, they stay as they are and what follows is content. What is no call
    before it was reported is content as it stands.
    """

    def feed(self, text: str) -> list[Event]:
        """Return what more text decides."""
        ...

    def finish(self) -> list[Event]:
        """Return what was held back, when no text follows."""
        ...


class PlainText:
    """Parser of text that is all content."""

    def feed(self, text: str) -> list[Event]:
        """Return the text as content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: nothing was held back."""
        return []


class EventLog:
    """Collects events in order; texts of the same kind that follow each other become one."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[Event] = []

    def content(self, text: str) -> None:
        """Note text of the answer."""
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Note text of the reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def start_call(self, name: str) -> None:
        """Note that a call begins."""
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Note arguments of the call that began last."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = joined(self._events), []
        return events


def joined(events: list[Event]) -> list[Event]:
    """Return the events with neighbours of the same kind, and the same call, as one."""
    result: list[Event] = []
    for event in events:
        match (result[-1] if result else None), event:
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(event)
    return result
