"""`GrammarConstraint`: what the next token of one sample may be, given its output so far."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher


class GrammarConstraint:
    """The state of a grammar after the tokens that were accepted (mutable; one per sample).

    Args:
      matcher: at its start, and nobody else's.
      jumps: whether tokens without an alternative may be appended unsampled.
    """

    __slots__ = ("jumps", "matcher")

    def __init__(self, matcher: LLMatcher, *, jumps: bool) -> None:
        self.matcher = matcher
        self.jumps = jumps

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow any more: the output is complete."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """Why a token was not accepted, in one line."""
        return first_line(self.matcher.get_error()) or "no token is allowed"

    def accept(self, token_id: int) -> bool:
        """Append a token; False if it must not follow, after which nothing is accepted."""
        return self.matcher.consume_token(token_id)

    def take_forced(self, limit: int) -> list[int]:
        """Return and accept the next tokens, at most `limit`, to which there is no alternative.

        The text is what has no alternative; its tokens are those that the tokenizer would give.
        """
        if not self.jumps or limit <= 0 or self.matcher.is_stopped():
            return []
        forced = self.matcher.compute_ff_tokens()[:limit]
        if forced and not self.matcher.consume_tokens(forced):
            return []
        return forced


class MaskFiller:
    """Writes the masks of a step, several at once where there are cores for it."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, wanted: Sequence[tuple[GrammarConstraint, int]], masks: np.ndarray) -> None:
        """Write which tokens each constraint allows into its row.

        Args:
          wanted: constraints, and the row of each.
          masks: int32 `[num_rows, num_words]`; bit i of word w, from the lowest, is token
            32 * w + i. A constraint that has failed leaves anything there, and accepts nothing.
        """
        row_bytes = masks.shape[1] * masks.itemsize
        if len(wanted) == 1:
            constraint, row = wanted[0]
            constraint.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, row_bytes)
        elif wanted:
            if self._executor is None:
                self._executor = LLExecutor()
            pairs = [(constraint.matcher, row) for constraint, row in wanted]
            self._executor.unsafe_compute_mask_ptr(
                pairs, masks.ctypes.data, row_bytes, masks.shape[0]
            )


def first_line(error: str, limit: int = 300) -> str:
    """Return what a client is told of an error message: its gist, without drawings of the place."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    gist = lines[0] if lines else ""
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([gist, *reasons])[:limit]
