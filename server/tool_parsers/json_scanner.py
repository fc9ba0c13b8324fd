"""`JsonScanner`: where a JSON value ends in a text that is still growing, and whether it is one."""

import json
import re
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SPACES = re.compile(r"[ \t\n\r]+")
_LITERALS = ("true", "false", "null")


class _State(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value or "]"
    FIRST_KEY = auto()  # a key or "}"
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # "," or the end of the container
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """Takes in one JSON value, piece by piece, in linear time and without recursion (mutable).

    Control characters within strings, which models write and JSON forbids, are accepted and
    escaped: nothing else about the text changes.

    Attributes:
      is_complete: the value has ended.
      is_wrong: the text is no JSON.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_wrong = False
        self._state = _State.VALUE
        self._stack: list[str] = []  # the closing brackets that are due
        self._is_key = False  # of the string that is being read
        self._word = ""  # the number or literal that is being read
        self._num_hex = 0

    def scan(self, text: str, start: int = 0) -> tuple[int, str]:
        """Take in characters from `start`; return where it stopped and the JSON of what it took.

        It stops before the end of the text only where the value is complete or wrong: at the first
        character that does not belong to it.
        """
        position, pieces = start, list[str]()
        while position < len(text) and not (self.is_complete or self.is_wrong):
            before = position
            position, piece = self._step(text, position)
            if piece is None:
                piece = text[before:position]
            pieces.append(piece)
        return position, "".join(pieces)

    def _step(self, text: str, position: int) -> tuple[int, str | None]:
        """Take in a run of characters; return where it ends, and its JSON where that differs."""
        character, state = text[position], self._state
        if state is _State.STRING:
            if run := _PLAIN.match(text, position):
                return run.end(), None
            return position + 1, self._in_string(character)
        if state is _State.ESCAPE:
            return self._expect(character in '"\\/bfnrtu', position, self._after_escape(character))
        if state is _State.HEX:
            self._num_hex += 1
            after = _State.STRING if self._num_hex == 4 else _State.HEX
            return self._expect(character in "0123456789abcdefABCDEF", position, after)
        if state is _State.NUMBER:
            return self._in_number(text, position), None
        if state is _State.LITERAL:
            return self._in_literal(character, position), None
        if run := _SPACES.match(text, position):
            return run.end(), None
        return self._structural(character, position)

    def _in_string(self, character: str) -> str:
        if character == "\\":
            self._state = _State.ESCAPE
        elif character == '"':
            if self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        else:
            return json.dumps(character)[1:-1]
        return character

    def _after_escape(self, character: str) -> _State:
        self._num_hex = 0
        return _State.HEX if character == "u" else _State.STRING

    def _in_number(self, text: str, position: int) -> int:
        if run := _NUMBER_CHARACTERS.match(text, position):
            self._word += run[0]
            return run.end()
        if _NUMBER.fullmatch(self._word):
            self._end_value()
        else:
            self.is_wrong = True
        return position

    def _in_literal(self, character: str, position: int) -> int:
        self._word += character
        if not any(literal.startswith(self._word) for literal in _LITERALS):
            self.is_wrong = True
            return position
        if self._word in _LITERALS:
            self._end_value()
        return position + 1

    def _structural(self, character: str, position: int) -> tuple[int, None]:
        state = self._state
        if state is _State.COLON:
            return self._expect(character == ":", position, _State.VALUE)
        closes = bool(self._stack) and character == self._stack[-1]
        if closes and state in (_State.FIRST_ITEM, _State.FIRST_KEY, _State.AFTER):
            self._stack.pop()
            self._end_value()
            return position + 1, None
        if state is _State.AFTER:
            after = _State.KEY if self._stack[-1] == "}" else _State.VALUE
            return self._expect(character == ",", position, after)
        if state in (_State.FIRST_KEY, _State.KEY):
            self._is_key = True
            return self._expect(character == '"', position, _State.STRING)
        return self._begin_value(character, position)

    def _begin_value(self, character: str, position: int) -> tuple[int, None]:
        self._word = ""
        self._is_key = False
        if character == "{":
            self._stack.append("}")
            return self._expect(True, position, _State.FIRST_KEY)
        if character == "[":
            self._stack.append("]")
            return self._expect(True, position, _State.FIRST_ITEM)
        if character == '"':
            return self._expect(True, position, _State.STRING)
        if character in "-0123456789":
            self._word = character
            return self._expect(True, position, _State.NUMBER)
        self._word = character
        return self._expect(character in "tfn", position, _State.LITERAL)

    def _end_value(self) -> None:
        self._state = _State.AFTER
        self.is_complete = not self._stack

    def _expect(self, is_right: bool, position: int, after: _State) -> tuple[int, None]:
        if not is_right:
            self.is_wrong = True
            return position, None
        self._state = after
        return position + 1, None
