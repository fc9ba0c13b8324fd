"""Messages on channels, as gpt-oss writes them: reasoning, calls and answer in one format.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>`, and `<|channel|>final<|message|>...<|return|>`.
"""

import re

from paged.server.tool_parsers.events import Event, EventLog
from paged.server.tool_parsers.framed import SPACES, overlap, pieces_of
from paged.server.tool_parsers.json_scanner import JsonScanner

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)

_MAX_HEADER_CHARS = 256
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")
_BODY_MARK = re.compile("|".join(map(re.escape, (*_ENDS, START))))


class HarmonyParser:
    """Parser of the format (mutable; see `TextParser`).

    A text that does not begin with a header is content, as where a message is continued. A header
    that is cut says nothing.

    Args:
      reads_calls: report calls; otherwise their text is content.

    Source: https://github.com/openai/harmony/blob/main/docs/format.md
    """

    def __init__(self, *, reads_calls: bool) -> None:
        self._log = EventLog()
        self._reads_calls = reads_calls
        self._pending = ""
        self._in_header = True
        self._is_first = True
        self._is_reasoning = False
        self._arguments: JsonScanner | None = None  # of the call that is being read
        self._is_empty = False  # it has no arguments yet
        self._rest = ""  # behind them

    def feed(self, text: str) -> list[Event]:
        """Return what more text decides."""
        for piece in pieces_of(text):
            self._pending += piece
            while self._step(False):
                pass
        return self._log.take()

    def finish(self) -> list[Event]:
        """Return what was held back, when no text follows."""
        while self._step(True):
            pass
        self._end_body()
        return self._log.take()

    def _step(self, is_over: bool) -> bool:
        return self._header(is_over) if self._in_header else self._body(is_over)

    def _header(self, is_over: bool) -> bool:
        if self._is_first and not self._may_be_header():
            self._begin_body("")
            return True
        header, mark, rest = self._pending.partition(MESSAGE)
        if mark and len(header) <= _MAX_HEADER_CHARS:
            self._pending = rest
            self._begin_body(header)
            return True
        if mark or len(header) - overlap(header, MESSAGE) > _MAX_HEADER_CHARS:
            self._begin_body("")
            if self._pending.startswith(START):  # with which the body would end at once
                self._say(START)
                self._pending = self._pending[len(START) :]
            return True
        if is_over:
            self._pending = ""
        return False

    def _may_be_header(self) -> bool:
        text = self._pending.lstrip(SPACES)
        openings = (START, CHANNEL, "to=")
        return any(text.startswith(opening) or opening.startswith(text) for opening in openings)

    def _begin_body(self, header: str) -> None:
        self._in_header = self._is_first = False
        channel = _CHANNEL.search(header)
        function = _FUNCTION.search(header)
        self._is_reasoning = channel is not None and channel[1] == "analysis"
        self._arguments = None
        self._rest = ""
        if function is not None and self._reads_calls:
            self._is_reasoning = False
            self._arguments = JsonScanner()
            self._is_empty = True
            self._log.start_call(function[1])

    def _body(self, is_over: bool) -> bool:
        text = self._pending
        found = _BODY_MARK.search(text)
        if found is None:
            held = 0 if is_over else max(overlap(text, mark) for mark in (*_ENDS, START))
            self._say(text[: len(text) - held])
            self._pending = text[len(text) - held :]
            return False
        self._say(text[: found.start()])
        self._end_body()
        self._in_header = True
        # The mark of a start belongs to the header that it begins.
        self._pending = text[found.start() if found[0] == START else found.end() :]
        return True

    def _say(self, text: str) -> None:
        if self._is_reasoning:
            self._log.reasoning(text)
            return
        scanner = self._arguments
        if scanner is not None and not (scanner.is_complete or scanner.is_wrong):
            end, arguments = scanner.scan(text)
            self._log.arguments(arguments)
            self._is_empty = self._is_empty and not arguments.strip(SPACES)
            text = text[end:]
        if scanner is not None:  # whitespace behind the arguments, and nothing else, is nothing
            self._rest += text
            if not self._rest.strip(SPACES):
                return
            text, self._rest, self._arguments = self._rest, "", None
        self._log.content(text)

    def _end_body(self) -> None:
        if self._arguments is not None and self._is_empty:
            self._log.arguments("{}")
        self._arguments = None
