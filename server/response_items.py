"""`ResponseItems`: what parsers report of a text, as items of a response and the events between."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from paged.server.answer_bodies import PositionLogprobs
from paged.server.response_answers import (
    AnyEvent,
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallItem,
    Item,
    MessageItem,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    Part,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Status,
)
from paged.server.tool_parsers.events import CallArguments, CallStart, Content, Reasoning
from paged.server.tool_parsers.events import Event as ParserEvent


class ResponseItems:
    """The items of one response as they grow; one is open at a time (mutable).

    Attributes:
      output: all items, the open one with what it has so far.
    """

    def __init__(self) -> None:
        self.output: list[Item] = []
        self._open: Item | None = None

    def feed(
        self, events: Sequence[ParserEvent], logprobs: Sequence[PositionLogprobs] = ()
    ) -> list[AnyEvent]:
        """Return the events that more of the model's text brings about.

        Args:
          events: what a parser says of it.
          logprobs: of its tokens; they go with the first text among the events.
        """
        result: list[AnyEvent] = []
        positions = list(logprobs)
        for event in events:
            match event:
                case Content(text):
                    message, opening = self._message()
                    result += opening
                    result.append(self._add_text(message, text, positions))
                    positions = []
                case Reasoning(text):
                    thought, opening = self._reasoning()
                    result += opening
                    thought.content[0].text += text
                    result.append(ReasoningTextDelta(**self._within(thought), delta=text))
                case CallStart(name=name):
                    result += self._close("completed")
                    call_id = f"call_{uuid.uuid4().hex[:24]}"
                    result += self._begin(
                        FunctionCallItem(
                            id=_new_id("fc"),
                            call_id=call_id,
                            name=name,
                            arguments="",
                            status="in_progress",
                        )
                    )
                case CallArguments(text=text):
                    call = self._open
                    assert isinstance(call, FunctionCallItem)
                    call.arguments += text
                    result.append(CallArgumentsDelta(**self._within(call), delta=text))
        return result

    def finish(self, *, is_complete: bool) -> list[AnyEvent]:
        """Return the events of the end; there is at least one item then.

        Args:
          is_complete: the model ended by itself; otherwise the last item was cut off.
        """
        opening: list[AnyEvent] = []
        if not self.output:
            _, opening = self._message()
        return [*opening, *self._close("completed" if is_complete else "incomplete")]

    def _message(self) -> tuple[MessageItem, list[AnyEvent]]:
        """Return the open message, and the events of its opening if it was not open."""
        if isinstance(self._open, MessageItem):
            return self._open, []
        events = self._close("completed")
        item = MessageItem(id=_new_id("msg"), status="in_progress", content=[])
        events += self._begin(item)
        part = OutputText(text="")
        events.append(ContentPartAdded(**self._within(item), part=msgspec.to_builtins(part)))
        item.content.append(part)
        return item, events

    def _reasoning(self) -> tuple[ReasoningItem, list[AnyEvent]]:
        """Do what `_message` does, for thoughts."""
        if isinstance(self._open, ReasoningItem):
            return self._open, []
        events = self._close("completed")
        item = ReasoningItem(id=_new_id("rs"), status="in_progress", content=[])
        events += self._begin(item)
        part = ReasoningText(text="")
        events.append(ContentPartAdded(**self._within(item), part=msgspec.to_builtins(part)))
        item.content.append(part)
        return item, events

    def _add_text(
        self, message: MessageItem, text: str, positions: list[PositionLogprobs]
    ) -> AnyEvent:
        part = message.content[0]
        part.text += text
        part.logprobs += positions
        return OutputTextDelta(**self._within(message), delta=text, logprobs=positions)

    def _begin(self, item: Item) -> list[AnyEvent]:
        self._open = item
        self.output.append(item)
        return [OutputItemAdded(output_index=len(self.output) - 1, item=_copy(item))]

    def _close(self, status: Status) -> list[AnyEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        within: dict[str, Any] = {"item_id": item.id, "output_index": len(self.output) - 1}
        done: list[AnyEvent] = []
        match item:
            case FunctionCallItem():
                done.append(CallArgumentsDone(**within, name=item.name, arguments=item.arguments))
            case MessageItem(content=[part]):
                done.append(OutputTextDone(**within, text=part.text, logprobs=part.logprobs))
                done.append(_part_done(within, part))
            case ReasoningItem(content=[thought]):
                done.append(ReasoningTextDone(**within, text=thought.text))
                done.append(_part_done(within, thought))
        return [*done, OutputItemDone(output_index=len(self.output) - 1, item=_copy(item))]

    def _within(self, item: Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self.output) - 1}


def _part_done(within: dict[str, Any], part: Part) -> ContentPartDone:
    return ContentPartDone(**within, part=msgspec.to_builtins(part))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _copy(item: Item) -> Item:
    """Return an item as it is now, whatever is added to it before an event is sent."""
    if isinstance(item, FunctionCallItem):
        return msgspec.structs.replace(item)
    return msgspec.structs.replace(item, content=list(item.content))
