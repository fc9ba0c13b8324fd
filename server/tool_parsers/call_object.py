"""`CallObject`: one `{"name": ..., "arguments": {...}}`, its arguments as they come."""

import json
from enum import Enum, auto

from paged.server.tool_parsers.json_scanner import JsonScanner

_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")
# What models, and the APIs they learnt from, write beside the two.
_OTHER_KEYS = ("type", "id", "index")
_SPACES = " \t\n\r"


class _State(Enum):
    OPEN = auto()
    FIRST_KEY = auto()  # a key or "}"
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()  # "," or "}"


class CallObject:
    """A call written as a JSON object, taken in piece by piece (mutable).

    The members may come in any order, the arguments under "arguments" or "parameters". They must
    be an object; null, or none at all, count as an empty one.

    Attributes:
      name: of the function, once it has been read.
      has_begun: the name is known and so is that arguments follow, or that there are none: from
        here on the text is a call.
      is_complete: the object has ended.
      is_wrong: the text is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_wrong = False
        self._state = _State.OPEN
        self._scanner = JsonScanner()
        self._key = ""
        self._value = ""
        self._arguments = ""  # that nobody has taken yet
        self._has_arguments = False

    @property
    def has_begun(self) -> bool:
        """Whether the text has turned out to be a call."""
        return self.name is not None and (self._has_arguments or self.is_complete)

    def scan(self, text: str, start: int = 0) -> int:
        """Take in characters from `start`; return where it stopped.

        It stops before the end of the text only where the object is complete or wrong.
        """
        position = start
        while position < len(text) and not (self.is_complete or self.is_wrong):
            if self._state is _State.IN_KEY:
                position = self._in_key(text, position)
            elif self._state is _State.IN_VALUE:
                position = self._in_value(text, position)
            elif text[position] in _SPACES:
                position += 1
            else:
                position += self._structural(text[position])
        return position

    def take_arguments(self) -> str:
        """Return the text of the arguments that came since the last call."""
        text, self._arguments = self._arguments, ""
        return text

    def _structural(self, character: str) -> int:
        """Take in one character, or none where a key or value begins with it."""
        match self._state, character:
            case _State.OPEN, "{":
                self._state = _State.FIRST_KEY
            case ((_State.FIRST_KEY | _State.AFTER), "}"):
                self._end()
            case ((_State.FIRST_KEY | _State.KEY), '"'):
                self._begin(_State.IN_KEY)
                return 0
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.VALUE, _:
                self._begin_value(character)
                return 0
            case _State.AFTER, ",":
                self._state = _State.KEY
            case _:
                self.is_wrong = True
                return 0
        return 1

    def _begin(self, state: _State) -> None:
        self._state = state
        self._scanner = JsonScanner()
        self._value = ""

    def _in_key(self, text: str, position: int) -> int:
        position, piece = self._scanner.scan(text, position)
        self._value += piece
        self.is_wrong = self._scanner.is_wrong
        if self._scanner.is_complete:
            self._key = json.loads(self._value)
            self._state = _State.COLON
            known = self.has_begun or self._key in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS)
            again = self._key in _NAME_KEYS and self.name is not None
            again = again or (self._key in _ARGUMENT_KEYS and self._has_arguments)
            self.is_wrong = again or not known
        return position

    def _begin_value(self, character: str) -> None:
        if self._key in _NAME_KEYS:
            self.is_wrong = character != '"'
        elif self._key in _ARGUMENT_KEYS:
            self.is_wrong = character not in "{n"
            self._has_arguments = character == "{"
        self._begin(_State.IN_VALUE)

    def _in_value(self, text: str, position: int) -> int:
        position, piece = self._scanner.scan(text, position)
        self.is_wrong = self._scanner.is_wrong
        if self._key in _ARGUMENT_KEYS and self._has_arguments:
            self._arguments += piece
        elif self._key in _NAME_KEYS:
            self._value += piece
        if self._scanner.is_complete:
            self._state = _State.AFTER
            if self._key in _NAME_KEYS:
                self.name = json.loads(self._value)
                # An escape can be a lone surrogate, which no answer can carry.
                self.is_wrong = not self.name or not self.name.isprintable()
        return position

    def _end(self) -> None:
        if self.name is None:
            self.is_wrong = True
            return
        self.is_complete = True
        if not self._has_arguments:
            self._arguments = "{}"
