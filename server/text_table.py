"""Tables of text, as commands print them."""

from collections.abc import Sequence


def aligned(rows: Sequence[dict[str, str]]) -> str:
    """Return a table with a heading; the first column is aligned to the left, numbers to the right.

    Rows may lack columns that others have.
    """
    headings = list(dict.fromkeys(name for row in rows for name in row))
    cells = [headings, *[[row.get(name, "") for name in headings] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
