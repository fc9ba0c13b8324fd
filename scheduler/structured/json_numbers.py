"""Numbers in JSON outputs come to an end: grammars allow any number of digits.

A model that has begun a fraction such as 10 / 3 goes on with it until its output is cut, at any
temperature. So after `MAX_NUMBER_LENGTH` characters a number must end where it may.
"""

from collections.abc import Callable, Iterable

import numpy as np

MAX_NUMBER_LENGTH = 32
"""Characters; all digits of a float64, with sign and exponent, are 24, those of an int64 20."""

_DIGITS = frozenset(b"0123456789")
_IN_NUMBERS = frozenset(b"0123456789.eE+-")
_QUOTE, _BACKSLASH = b'"\\'


class NumberTokens:
    """Which tokens of a vocabulary go on with a number (immutable; shared by all samples).

    Args:
      bytes_of: the bytes of a token.
      vocab_size: number of tokens.
      num_words: int32 words of a mask.

    Attributes:
      bytes_of: as given.
      others: int32 `[num_words]`, a mask of all tokens but those.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], *, vocab_size: int, num_words: int
    ) -> None:
        self.bytes_of = bytes_of
        is_other = np.ones(num_words * 32, np.bool_)
        for token_id in range(vocab_size):
            data = bytes_of(token_id)
            is_other[token_id] = not data or data[0] not in _IN_NUMBERS
        self.others = np.packbits(is_other, bitorder="little").view("<i4").astype(np.int32)


class NumberLength:
    """How long the number is that a JSON text ends with, 0 if with none (mutable; one per sample).

    Args:
      tokens: of the vocabulary.
    """

    __slots__ = ("_ends_with_digit", "_in_string", "_is_escaped", "_length", "tokens")

    def __init__(self, tokens: NumberTokens) -> None:
        self.tokens = tokens
        self._length = 0
        self._ends_with_digit = self._in_string = self._is_escaped = False

    @property
    def must_end(self) -> bool:
        """Whether the number is long enough, and complete."""
        return self._length >= MAX_NUMBER_LENGTH and self._ends_with_digit

    def feed(self, token_ids: Iterable[int]) -> None:
        """Take in more of the text."""
        for token_id in token_ids:
            data = self.tokens.bytes_of(token_id)
            # Most of a text is inside of strings.
            if not self._in_string or _QUOTE in data or _BACKSLASH in data or self._is_escaped:
                self._scan(data)

    def _scan(self, data: bytes) -> None:
        for byte in data:
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == _BACKSLASH:
                    self._is_escaped = True
                elif byte == _QUOTE:
                    self._in_string = False
            elif byte in _IN_NUMBERS:
                self._length += 1
                self._ends_with_digit = byte in _DIGITS
            else:
                self._length = 0
                self._in_string = byte == _QUOTE
