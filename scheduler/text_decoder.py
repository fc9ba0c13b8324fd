"""`TextDecoder`: generated ids to text, piece by piece.

Works on bytes: a text is the concatenation of its tokens' bytes, so what is complete can be
released at once and exactly. (Decoding growing lists of ids, as `tokenizers.DecodeStream` does,
fails on some invalid sequences and takes quadratic time on others.)
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

# Longest incomplete UTF-8 sequence.
_MAX_PENDING_BYTES = 3


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that may be left out of the text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that one token stands for."""


class TextDecoder:
    """The characters of one sample, each as soon as its last byte is there (mutable).

    Bytes that can never become a character are U+FFFD, as in the tokenizer's own `decode`.
    (SentencePiece's `decode` differs in one case: it gives one U+FFFD per byte of an incomplete
    character and its neighbours.)

    Args:
      tokenizer: of the model.
      prompt_token_ids: ids before the sample: they may end within a character.
      skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # no character has begun and not ended
        self._decode(self._tail(prompt_token_ids))

    def step(self, token_id: int) -> str:
        """Return the characters that one more token completes."""
        if token_id in self._skipped_ids:
            return ""
        data = self._token_bytes(token_id)
        if self._is_whole:
            # Nearly every token: three times as fast as the incremental decoder.
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._decode(data)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the characters that some more tokens complete."""
        skipped, token_bytes = self._skipped_ids, self._token_bytes
        return self._decode(b"".join([token_bytes(i) for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        """Return what is left when no tokens follow: U+FFFD for an incomplete character."""
        self._is_whole = True
        return self._decoder.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the last bytes of the prompt, enough to hold a character's beginning."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_PENDING_BYTES:
                break
            if token_id not in self._skipped_ids:
                tail = self._token_bytes(token_id) + tail
        return tail
