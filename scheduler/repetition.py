"""`RepetitionDetection`: ends an output that has begun to go round in circles."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PATTERN_SIZE = 1024
"""Longest pattern that is looked for; looking costs time at every token."""


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """When an output counts as repeating itself: its end is a pattern, several times over.

    Attributes:
      max_pattern_size: longest pattern, tokens; 0 turns detection off.
      min_pattern_size: shortest pattern, tokens; 0 means 1.
      min_count: how many times in a row a pattern must occur, at least 2.

    Raises: ValueError if the sizes or the count contradict this.

    Source: vLLM `sampling_params.py`, `v1/core/sched/utils.py`.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise ValueError(
                "needs 0 <= min_pattern_size <= max_pattern_size <= "
                f"{MAX_PATTERN_SIZE}; both 0 turn it off"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("needs min_count >= 2; max_pattern_size 0 turns it off")

    def finds(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tokens end in a pattern that has come `min_count` times in a row."""
        length = len(token_ids)
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            span = size * self.min_count
            if span > length:
                return False
            # Nearly always told by one token.
            if token_ids[-1] == token_ids[-1 - size] and (
                token_ids[length - span : length - size] == token_ids[length - span + size :]
            ):
                return True
        return False
