"""Calls as JSON objects between marks: what hermes, llama3_json and lists of calls share."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from paged.server.tool_parsers.call_object import CallObject
from paged.server.tool_parsers.events import Event, EventLog

SPACES = " \t\n\r"
_PIECE_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How a format writes calls: `mark opening call separator call ... closing`, repeatedly.

    Attributes:
      mark: what announces calls within the text; "" if there is none.
      opening: stands before the first call, as "[" does.
      separator: stands between calls; "" if a mark of its own announces each.
      closing: stands after the last call; the text may end without it.
      starts_bare: calls may begin the text without the mark. Whether such a text is a call shows
        by its names alone, so only known functions count.
      fence: what may open and close around bare calls; None: nothing.
    """

    mark: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    starts_bare: bool = False
    fence: tuple[str, str] | None = None


class FramedCalls:
    """Parser of a `Frame` (mutable; see `TextParser`).

    Whitespace around calls belongs to them: templates put it there themselves.

    Args:
      frame: of the format.
      names: functions there are.
    """

    def __init__(self, frame: Frame, names: Collection[str]) -> None:
        self.log = EventLog()
        self._frame = frame
        self._names = names
        self._pending = ""  # not yet decided on
        self._raw = ""  # read since the text before a call, as long as the call has not begun
        self._is_marked = False
        self._closing = frame.closing
        self._call = CallObject()
        self._step: Callable[[bool], bool] = self._in_text
        if frame.starts_bare:
            self._step = self._at_start

    def feed(self, text: str) -> list[Event]:
        """Return what more text decides."""
        for piece in pieces_of(text):
            self._pending += piece
            while self._step(False):
                pass
        return self.log.take()

    def finish(self) -> list[Event]:
        """Return what was held back, when no text follows."""
        while self._step(True):
            pass
        return self.log.take()

    # Each state decides on the beginning of `_pending`, and returns whether there is more to do.

    def _at_start(self, is_over: bool) -> bool:
        text = self._pending.lstrip(SPACES)
        fence = self._frame.fence
        self._closing = self._frame.closing
        if text.startswith(self._bare_opening):
            return self._begin_bare(text)
        if fence and text.startswith(fence[0]):
            self._closing = fence[1]
            self._raw = self._take(len(self._pending) - len(text) + len(fence[0]))
            return self._go(self._in_fence)
        may_follow = self._bare_opening.startswith(text) or (fence and fence[0].startswith(text))
        if is_over or not may_follow:
            return self._go(self._in_text)
        return False

    @property
    def _bare_opening(self) -> str:
        return self._frame.opening or "{"

    def _begin_bare(self, text: str) -> bool:
        """Begin with what is pending but for the whitespace before `text`."""
        self._is_marked = False
        self._raw += self._take(len(self._pending) - len(text))
        return self._go(self._at_opening)

    def _in_fence(self, is_over: bool) -> bool:
        text = self._pending.lstrip(SPACES)
        if text.startswith(self._bare_opening):
            return self._begin_bare(text)
        return self._fail() if text or is_over else False

    def _in_text(self, is_over: bool) -> bool:
        text, mark = self._pending, self._frame.mark
        found = text.find(mark) if mark else -1
        if found >= 0:
            visible = text[:found].rstrip(SPACES)
            self.log.content(visible)
            self._is_marked, self._closing = True, self._frame.closing
            self._raw = self._take(found + len(mark))[len(visible) :]
            return self._go(self._at_opening)
        if is_over:
            visible = text
            if self.log.num_calls and not text.strip(SPACES):
                visible = ""
            self._pending = ""
        else:
            # What follows could be a call, whose mark has begun and whose whitespace this is.
            visible = text[: len(text) - overlap(text, mark)].rstrip(SPACES)
            self._pending = text[len(visible) :]
        self.log.content(visible)
        return False

    def _at_opening(self, is_over: bool) -> bool:
        if self._frame.opening:
            return self._expect(self._frame.opening, is_over, self._begin_call, self._fail)
        return self._begin_call()

    def _begin_call(self) -> bool:
        self._call = CallObject()
        return self._go(self._in_call)

    def _in_call(self, is_over: bool) -> bool:
        call, had_begun = self._call, self._call.has_begun
        taken = self._take(call.scan(self._pending))
        if not had_begun:
            self._raw += taken
            if call.has_begun and not self._accepts(call.name or ""):
                return self._fail()
            if call.has_begun:
                self.log.start_call(call.name or "")
                self._raw = ""
        if call.has_begun:
            self.log.arguments(call.take_arguments())
        if call.is_complete:
            return self._go(self._after_call)
        if call.is_wrong or is_over:
            return self._go(self._in_text) if call.has_begun else self._fail()
        return False

    def _after_call(self, is_over: bool) -> bool:
        if self._frame.separator:
            return self._expect(self._frame.separator, is_over, self._begin_call, self._close)
        return self._close()

    def _close(self) -> bool:
        return self._go(self._at_closing)

    def _at_closing(self, is_over: bool) -> bool:
        if self._closing:
            return self._expect(self._closing, is_over, self._leave, self._leave)
        return self._leave()

    def _leave(self) -> bool:
        self._raw = ""
        repeats = self._frame.starts_bare and not (self._is_marked or self._frame.separator)
        return self._go(self._at_start if repeats else self._in_text)

    def _expect(
        self, mark: str, is_over: bool, found: Callable[[], bool], missing: Callable[[], bool]
    ) -> bool:
        """Go on by whether the text goes on with a mark, behind whitespace or not."""
        text = self._pending.lstrip(SPACES)
        if text.startswith(mark):
            taken = self._take(len(self._pending) - len(text) + len(mark))
            self._raw += taken
            return found()
        if is_over or not mark.startswith(text):
            return missing()
        return False

    def _fail(self) -> bool:
        """Give up a call that had not begun: what was read of it is content after all."""
        self.log.content(self._raw)
        self._raw = ""
        return self._go(self._in_text)

    def _accepts(self, name: str) -> bool:
        return self._is_marked or name in self._names

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        return taken

    def _go(self, state: Callable[[bool], bool]) -> bool:
        self._step = state
        return True


def pieces_of(text: str) -> Iterator[str]:
    """Cut a text up, so that steps that copy or search all that is pending stay cheap."""
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
