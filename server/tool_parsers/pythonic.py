"""`[f(a=1, b="x"), g()]`: calls written as a list in Python (Llama 3.2 and 4, OLMo, ToolACE)."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any

from paged.server.tool_parsers.events import Event, EventLog
from paged.server.tool_parsers.framed import SPACES, pieces_of

# Llama 4 may put the list between these.
START_MARK, END_MARK = "<|python_start|>", "<|python_end|>"

_MAX_NAME_CHARS = 256
_MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
# Models mix the two languages.
_JSON_NAMES = {"true": True, "false": False, "null": None}


class _State(Enum):
    START = auto()
    CALL = auto()  # a call's name and bracket
    ARGUMENT = auto()  # an argument's name and "=", or ")"
    VALUE = auto()
    AFTER_CALL = auto()  # "," or "]"
    END = auto()  # the mark of the end
    TEXT = auto()


class PythonicCalls:
    """Parser of calls in Python's syntax (mutable; see `TextParser`).

    The list has to begin the text, and only known functions count: whether a list is one of calls
    shows by their names alone. Arguments are keywords with literal values; each is reported when
    its value is complete.

    Args:
      names: functions there are.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._log = EventLog()
        self._names = names
        self._pending = ""
        self._raw = ""  # read of a call that has not begun
        self._state = _State.START
        self._num_arguments = 0
        self._argument = ""
        self._value = _Extent()

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
        return self._log.take()

    def _step(self, is_over: bool) -> bool:
        """Decide on the beginning of `_pending`; return whether there is more to do."""
        if self._state is _State.TEXT:
            text, self._pending = self._pending, ""
            if not (is_over and self._log.num_calls and not text.strip(SPACES)):
                self._log.content(self._hold_back(text, is_over))
            return False
        if self._state is _State.VALUE:
            return self._in_value(is_over)
        text = self._pending.lstrip(SPACES)
        self._skip(len(self._pending) - len(text))
        steps: dict[_State, Callable[[str], bool | None]] = {
            _State.START: self._at_start,
            _State.CALL: self._at_call,
            _State.ARGUMENT: self._at_argument,
            _State.AFTER_CALL: self._after_call,
            _State.END: self._at_end,
        }
        decided = steps[self._state](text)
        if decided is None:
            return self._give_up() if is_over else False
        return decided or self._give_up()

    # Each returns True for a step forward, False if the text is wrong, None if it needs more.

    def _at_start(self, text: str) -> bool | None:
        if text.startswith(START_MARK):
            return self._advance(START_MARK, _State.START)
        if text.startswith("["):
            return self._advance("[", _State.CALL)
        return None if START_MARK.startswith(text) else False

    def _at_call(self, text: str) -> bool | None:
        name, rest = _split_name(text)
        if rest.startswith("(") and name in self._names:
            self._log.start_call(name)
            self._log.arguments("{")
            self._num_arguments = 0
            self._advance(text[: text.index("(") + 1], _State.ARGUMENT)
            self._raw = ""
            return True
        return None if not rest and len(name) <= _MAX_NAME_CHARS else False

    def _at_argument(self, text: str) -> bool | None:
        # Python allows a comma behind the last argument.
        if text.startswith(")"):
            self._log.arguments("}")
            return self._advance(")", _State.AFTER_CALL)
        name, rest = _split_name(text)
        if rest.startswith("=") and name:
            self._argument = name
            self._value = _Extent()
            return self._advance(text[: text.index("=") + 1], _State.VALUE)
        return None if not rest and len(name) <= _MAX_NAME_CHARS else False

    def _after_call(self, text: str) -> bool | None:
        if text.startswith(","):
            return self._advance(",", _State.CALL)
        if text.startswith("]"):
            return self._advance("]", _State.END)
        return False if text else None

    def _at_end(self, text: str) -> bool | None:
        if text.startswith(END_MARK):
            return self._advance(END_MARK, _State.TEXT)
        return None if END_MARK.startswith(text) else False

    def _in_value(self, is_over: bool) -> bool:
        value = self._value
        self._pending = self._pending[value.scan(self._pending) :]
        if not value.has_ended:
            return self._fail_value() if is_over else False
        try:
            text = _to_json(value.text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return self._fail_value()
        separator = ", " if self._num_arguments else ""
        self._log.arguments(f"{separator}{json.dumps(self._argument)}: {text}")
        self._num_arguments += 1
        self._state = _State.ARGUMENT
        if self._pending.startswith(","):
            self._pending = self._pending[1:]
        return True

    def _fail_value(self) -> bool:
        self._pending = self._value.text + self._pending
        return self._give_up()

    def _give_up(self) -> bool:
        """Take what follows for text, and what was read of a call that has not begun."""
        self._log.content(self._raw)
        self._raw = ""
        self._state = _State.TEXT
        return True

    def _advance(self, taken: str, state: _State) -> bool:
        self._skip(len(taken))
        self._state = state
        return True

    def _skip(self, length: int) -> None:
        if self._state in (_State.START, _State.CALL):
            self._raw += self._pending[:length]
        self._pending = self._pending[length:]

    def _hold_back(self, text: str, is_over: bool) -> str:
        """Return the text less the whitespace at its end, as long as more may come."""
        visible = text if is_over else text.rstrip(SPACES)
        self._pending = text[len(visible) :]
        return visible


class _Extent:
    """Finds where a value ends: before a comma or bracket outside of its own (mutable)."""

    def __init__(self) -> None:
        self.has_ended = False
        self._pieces: list[str] = []
        self._stack: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def text(self) -> str:
        """What belongs to the value so far."""
        return "".join(self._pieces)

    def scan(self, text: str) -> int:
        """Take in characters; return where it stopped."""
        for position, character in enumerate(text):
            if self._is_end(character):
                self.has_ended = True
                self._pieces.append(text[:position])
                return position
        self._pieces.append(text)
        return len(text)

    def _is_end(self, character: str) -> bool:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in _BRACKETS:
            self._stack.append(_BRACKETS[character])
        elif self._stack and character == self._stack[-1]:
            self._stack.pop()
        else:
            return not self._stack and character in ",)]}"
        # Python's own parser takes the rest apart, with a stack of its own.
        return len(self._stack) > _MAX_DEPTH


def _split_name(text: str) -> tuple[str, str]:
    """Return the name that a text begins with, and what follows on it and on whitespace."""
    found = _NAME.match(text)
    name = found[0] if found else ""
    return name, text[len(name) :].lstrip(SPACES)


def _to_json(source: str) -> str:
    """Return the JSON of a Python literal.

    Raises: ValueError or SyntaxError if it is none, or JSON has no such value.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings that Python does not know
        node = ast.parse(source.strip(), mode="eval").body
    text = json.dumps(_value(node), ensure_ascii=False, allow_nan=False)
    text.encode()  # raises UnicodeEncodeError, a ValueError, where an escape is no character
    return text


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise ValueError("is no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("JSON has only strings for keys")
