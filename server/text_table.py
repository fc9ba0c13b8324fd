"""`aligned`: rows of cells as a table of plain text."""

from collections.abc import Sequence


def aligned(rows: Sequence[dict[str, str]], *, left: int = 1) -> str:
    """Return a table with a heading; numbers are aligned to the right.

    Args:
      rows: cells by their headings; some may lack columns that others have.
      left: how many columns, the first ones, are text and aligned to the left.
    """
    headings = list(dict.fromkeys(name for row in rows for name in row))
    cells = [headings, *[[row.get(name, "") for name in headings] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
