"""`[TOOL_CALLS]` and a list of calls; since tokenizer version 11 `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from paged.server.tool_parsers.framed import SPACES, Frame, FramedCalls
from paged.server.tool_parsers.json_scanner import JsonScanner

FRAME = Frame(mark="[TOOL_CALLS]", opening="[", separator=",", closing="]")
ARGUMENTS_MARK = "[ARGS]"
_ID_MARK = "[CALL_ID]"

_MAX_HEAD_CHARS = 256

_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


class MistralCalls(FramedCalls):
    """Parser of both forms (mutable; see `TextParser`)."""

    def _at_opening(self, is_over: bool) -> bool:
        text = self._pending.lstrip(SPACES)
        if text and not text.startswith(FRAME.opening):
            return self._go(self._in_name)
        return super()._at_opening(is_over)

    def _in_name(self, is_over: bool) -> bool:
        """Read `name[ARGS]` or `name[CALL_ID]id[ARGS]`, up to the brace."""
        head, brace, _ = self._pending.partition("{")
        name, *marks = re.split(r"(?=\[)", head.strip(SPACES))
        is_name = _NAME.fullmatch(name) is not None
        is_short = len(head) <= _MAX_HEAD_CHARS
        if brace and is_short and is_name and _are_marks("".join(marks), is_whole=True):
            self._take(len(head))
            self.log.start_call(name)
            self._raw = ""
            self._scanner = JsonScanner()
            return self._go(self._in_arguments)
        may_go_on = (is_name or not name) and _are_marks("".join(marks), is_whole=False)
        if brace or is_over or not (is_short and may_go_on):
            return self._fail()
        return False

    def _in_arguments(self, is_over: bool) -> bool:
        end, arguments = self._scanner.scan(self._pending)
        self._take(end)
        self.log.arguments(arguments)
        is_done = self._scanner.is_complete or self._scanner.is_wrong or is_over
        return self._leave() if is_done else False


def _are_marks(text: str, *, is_whole: bool) -> bool:
    """Whether a text is what may stand between name and arguments, or the beginning of it."""
    if text.startswith(_ID_MARK):
        call_id, bracket, rest = text[len(_ID_MARK) :].partition("[")
        is_id = not call_id or _NAME.fullmatch(call_id) is not None
        return is_id and _are_marks(bracket + rest, is_whole=is_whole)
    if is_whole:
        return text.strip(SPACES) in ("", ARGUMENTS_MARK)
    text = text.strip(SPACES)
    return any(mark.startswith(text) for mark in (ARGUMENTS_MARK, _ID_MARK))
