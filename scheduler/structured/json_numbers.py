"""Numbers in JSON outputs come to an end: grammars allow any number of digits.

A model that has begun a fraction such as 10 / 3 goes on with it until its output is cut, at any
temperature. So after `MAX_NUMBER_LENGTH` characters a number must end where it may: in outputs that
are JSON, and in JSON that is a part of them, as in a tool call or behind reasoning.
"""

from collections.abc import Callable, Iterable

import numpy as np

MAX_NUMBER_LENGTH = 32
"""Characters; all digits of a float64, with sign and exponent, are 24, those of an int64 20."""

_DIGITS = frozenset(b"0123456789")
_IN_NUMBERS = frozenset(b"0123456789.eE+-")
_QUOTE, _BACKSLASH = b'"\\'
# What neither goes on with a number nor follows on one, but is allowed in any text, and in strings.
_NOT_AT_NUMBERS = frozenset(b'"\\ABCDFGHIJKLMNOPQRSTUVWXYZabcdfghijklmnopqrstuvwxyz')


class NumberTokens:
    """Which tokens of a vocabulary go on with a number (immutable; shared by all samples).

    Args:
      bytes_of: the bytes of a token.
      vocab_size: number of tokens.
      num_words: int32 words of a mask.

    Attributes:
      bytes_of: as given.
      others: int32 `[num_words]`, a mask of all tokens but those.
      texts: int32 `[num_words]`, a mask of tokens that no JSON has behind a number.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], *, vocab_size: int, num_words: int
    ) -> None:
        self.bytes_of = bytes_of
        is_other = np.ones(num_words * 32, np.bool_)
        is_text = np.zeros(num_words * 32, np.bool_)
        for token_id in range(vocab_size):
            data = bytes_of(token_id)
            is_other[token_id] = not data or data[0] not in _IN_NUMBERS
            is_text[token_id] = bool(data) and data[0] in _NOT_AT_NUMBERS
        self.others, self.texts = _packed(is_other), _packed(is_text)


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class NumberLength:
    """How long the number is that a text ends with, 0 if with none (mutable; one per sample).

    Args:
      tokens: of the vocabulary.
      is_whole: the text is JSON, not only parts of it; so that its strings can be told from the
        rest.
    """

    __slots__ = ("_ends_with_digit", "_in_string", "_is_escaped", "_is_whole", "_length", "_tokens")

    def __init__(self, tokens: NumberTokens, *, is_whole: bool = True) -> None:
        self._tokens = tokens
        self._is_whole = is_whole
        self._length = 0
        self._ends_with_digit = self._in_string = self._is_escaped = False

    @property
    def must_end(self) -> bool:
        """Whether the number is long enough, and complete."""
        return self._length >= MAX_NUMBER_LENGTH and self._ends_with_digit

    def limit(self, mask: np.ndarray) -> None:
        """Forbid more digits if the number must end.

        Args:
          mask: int32 `[num_words]`, what the grammar allows; changed if something is left of it.
        """
        if not self.must_end:
            return
        if not self._is_whole and (mask & self._tokens.texts).any():
            return  # digits of a text, or of a string
        ended = mask & self._tokens.others
        if ended.any():
            mask[:] = ended

    def feed(self, token_ids: Iterable[int]) -> None:
        """Take in more of the text."""
        for token_id in token_ids:
            data = self._tokens.bytes_of(token_id)
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
                self._in_string = self._is_whole and byte == _QUOTE
