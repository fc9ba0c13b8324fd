"""`GrammarConstraint`: what the next token of one sample may be, given its output so far."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

from paged.scheduler.structured.json_numbers import NumberLength


class GrammarConstraint:
    """The state of a grammar after the tokens that were accepted (mutable; one per sample).

    Args:
      matcher: at its start, and nobody else's.
      jumps: whether tokens without an alternative may be appended unsampled.
      number: measures the number that the output ends with; None: there is no JSON in it.
    """

    __slots__ = ("jumps", "matcher", "number")

    def __init__(
        self, matcher: LLMatcher, *, jumps: bool, number: NumberLength | None = None
    ) -> None:
        self.matcher = matcher
        self.jumps = jumps
        self.number = number

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
        if not self.matcher.consume_token(token_id):
            return False
        if self.number is not None:
            self.number.feed((token_id,))
        return True

    def take_forced(self, limit: int) -> list[int]:
        """Return and accept the next tokens, at most `limit`, to which there is no alternative.

        The text is what has no alternative; its tokens are those that the tokenizer would give.
        """
        if not self.jumps or limit <= 0 or self.matcher.is_stopped():
            return []
        forced = self.matcher.compute_ff_tokens()[:limit]
        if forced and not self.matcher.consume_tokens(forced):
            return []
        if self.number is not None:
            self.number.feed(forced)
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
        for constraint, row in wanted:
            if constraint.number is not None:
                constraint.number.limit(masks[row])


def first_line(error: str, limit: int = 300) -> str:
    """Return what a client is told of an error message: its gist, without drawings of the place."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    gist = lines[0] if lines else ""
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([gist, *reasons])[:limit]
