"""`IncrementalDetokenizer`: the text of a sample up to a stop string."""

from collections.abc import Sequence

from paged.scheduler.text_decoder import TextDecoder, TokenBytes


class IncrementalDetokenizer:
    """The text of one sample, as it grows, searched for stop strings.

    A character is released when its last byte is there, as `TextDecoder` does. With stop strings,
    as many characters are held back as may turn out to belong to one.

    Args:
      tokenizer: of the model.
      prompt_token_ids: ids before the sample: they may end within a character.
      skip_special_tokens: leave special tokens out of the text.
      stop_strings: non-empty texts, the first of which to be completed ends the sample.
      include_stop_str: keep the matched stop string.
      min_tokens: a stop string counts only if it is completed after this many tokens.

    Attributes:
      text: everything decoded so far, cut at the stop string.
      stop_string: the stop string that ended the sample, or None.
      num_tokens: tokens given so far; after a match, those up to the one that completed it.

    Source: vLLM `v1/engine/detokenizer.py` for stop strings and what is held back.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop_strings: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self.num_tokens = 0
        self._decoder = TextDecoder(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stop_strings = tuple(stop_strings)
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._num_taken = 0
        self._num_held_back = 0
        if self._stop_strings and not include_stop_str:
            self._num_held_back = max(map(len, self._stop_strings)) - 1

    def update(self, token_ids: Sequence[int]) -> str | None:
        """Append generated tokens; return the stop string that they complete, if any.

        Tokens after a match are ignored, in this call and later ones.
        """
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            searched = len(self.text)
            self.text += self._decoder.step(token_id)
            if self.num_tokens > self._min_tokens:
                self._look_for_stop(searched)
        return self.stop_string

    def take_text(self, finished: bool) -> str:
        """Return the text that may be released and was not taken before.

        Args:
          finished: no tokens follow: hold nothing back, not even an incomplete character.
        """
        end = len(self.text) - self._num_held_back
        if finished or self.stop_string is not None:
            if self.stop_string is None:
                self.text += self._decoder.flush()
            end = len(self.text)
        start, self._num_taken = self._num_taken, max(self._num_taken, end)
        return self.text[start : self._num_taken]

    def _look_for_stop(self, searched: int) -> None:
        """Find the stop string that ends first after the first `searched` characters."""
        best_end, best = len(self.text) + 1, ""
        for stop in self._stop_strings:
            # It may begin before, but must end after: what ended before was looked at.
            start = self.text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best_end, best = start + len(stop), stop
        if best:
            self.stop_string = best
            self.text = self.text[: best_end if self._include_stop_str else best_end - len(best)]
