"""Runs parsers in tests: a text in pieces, and events as a client puts them together."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from paged.server.tool_parsers.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    TextParser,
)


@dataclass(frozen=True)
class Message:
    """What a client has in the end: `calls` are pairs of name and arguments' text."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


def message_of(events: Iterable[Event]) -> Message:
    """Put events together; checks that calls come in order, each begun once."""
    content, reasoning, names, arguments = "", "", list[str](), list[str]()
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case CallStart(index, name):
                assert index == len(names)
                names.append(name)
                arguments.append("")
            case CallArguments(index, text):
                assert text
                assert index == len(names) - 1
                arguments[index] += text
    return Message(content, tuple(zip(names, arguments, strict=True)), reasoning)


def read(parser: TextParser, pieces: Iterable[str]) -> Message:
    """Return what a text in pieces says."""
    return message_of([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def cut(text: str, places: Iterable[int]) -> Sequence[str]:
    """Return a text in pieces, cut at some places."""
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)


def texts_of(fragments: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts made of a format's own fragments and of anything else."""
    piece = st.one_of(st.sampled_from(fragments), st.text(max_size=4))
    return st.lists(piece, max_size=14).map("".join)
