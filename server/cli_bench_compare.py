"""`paged bench compare`: two results, or two folders of runs, side by side."""

import argparse

from paged.server.bench_compare import Row, compare, differences, read_runs
from paged.server.cli_errors import UserError, user_errors
from paged.server.text_table import aligned

_WORSE = 3


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0, or 3 with --fail-if-worse if a figure is.

    Raises: UserError if a file is no result, or both have no figure in common.
    """
    with user_errors():
        baseline, contender = read_runs(args.baseline), read_runs(args.contender)
    rows = compare(baseline, contender)
    if not rows:
        raise UserError(f"{args.baseline} and {args.contender} have no figure in common.")
    runs = f"{len(baseline)} and {len(contender)} runs" if len(baseline + contender) > 2 else ""
    print(f"A: {args.baseline}\nB: {args.contender}" + (f"\nMedians of {runs}" if runs else ""))
    print(aligned([_cells(row, args.tolerance) for row in rows]))
    unequal = list(differences(baseline[0], contender[0]))
    if unequal:
        print("\nNot the same on both sides:")
        print(aligned([{"": name, "A": str(a), "B": str(b)} for name, a, b in unequal]))
    worse = any(row.verdict(args.tolerance) == "worse" for row in rows)
    return _WORSE if worse and args.fail_if_worse else 0


def _cells(row: Row, tolerance: float) -> dict[str, str]:
    change = row.change
    return {
        "figure": row.name,
        "A": f"{row.baseline:.2f}",
        "B": f"{row.contender:.2f}",
        "change %": "-" if change is None else f"{change:+.1f}",
        f"beyond {tolerance:g}%": row.verdict(tolerance),
    }
