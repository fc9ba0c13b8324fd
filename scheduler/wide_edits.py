"""`fill_wide_edits`: the edits of rows with many of them, as the arrays that a step takes.

They cost nothing where nobody has that many: such a step gets arrays that lie on the device
(docs/decisions/0048).
"""

from collections.abc import Sequence
from typing import NamedTuple

from paged.models.batch import WideEdits
from paged.models.packing import BatchLayout
from paged.scheduler.logit_edits import WideRow, forbid


class WideRowEdits(NamedTuple):
    """What one row changes in one step.

    Attributes:
      row: of the sequence in the step.
      fixed: what its request changes at every step.
      forbidden: token ids that only this step forbids.
    """

    row: int
    fixed: WideRow
    forbidden: list[int]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is changed."""
        return not (self.forbidden or self.fixed.bias_ids.size) and self.fixed.allowed is None


def fill_wide_edits(rows: Sequence[WideRowEdits], layout: BatchLayout) -> WideEdits:
    """Return new NumPy arrays for a step: JAX may read them without a copy until it is done.

    Args:
      rows: those with edits.
      layout: of as many sequences as the program has rows.
    """
    edits = layout.empty_wide_edits()
    for row, fixed, forbidden in rows:
        if fixed.allowed is not None:
            edits.allowed[row] = fixed.allowed
        if forbidden:
            forbid(edits.allowed[row], forbidden)  # type: ignore[arg-type]
        size = fixed.bias_ids.size
        edits.bias_ids[row, :size] = fixed.bias_ids
        edits.bias_values[row, :size] = fixed.bias_values
    return edits
