"""`MaskedStep`: a step in flight whose tokens are not chosen before there are masks."""

from collections.abc import Callable

import numpy as np

from paged.scheduler.output import SchedulerOutput
from paged.scheduler.step_rows import StepRows
from paged.scheduler.structured.grammar_constraint import GrammarConstraint, MaskFiller


class MaskedStep[P]:
    """The model works on it already; `choose` starts the rest, once all tokens before are known.

    Args:
      num_rows, num_words: shape of the masks, int32.
      start: starts the choice of tokens and returns what is pending; the masks are its own.
    """

    def __init__(self, num_rows: int, num_words: int, start: Callable[[np.ndarray], P]) -> None:
        self._shape = num_rows, num_words
        self._start = start

    def choose(self, scheduled: SchedulerOutput, filler: MaskFiller) -> P:
        """Compute the masks of a step, while the device works, and start the choice of its tokens.

        A request may have got forced tokens since the step was planned: its sample would be the
        first of them, and is called off.
        """
        # A new array: JAX may read it without copying until the step is done.
        masks = np.full(self._shape, -1, np.int32)
        rows = StepRows.of(scheduled.scheduled)
        wanted: list[tuple[GrammarConstraint, int]] = []
        for row, request in enumerate(rows.requests):
            constraint = request.constraint
            if constraint is None or not rows.samples[row] or request.is_finished:
                continue
            if rows.starts[row] + rows.counts[row] < request.num_tokens:
                rows.samples[row] = False
                request.num_in_flight -= 1
            else:
                wanted.append((constraint, row))
        filler.fill(wanted, masks)
        return self._start(masks)
