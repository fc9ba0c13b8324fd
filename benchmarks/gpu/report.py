"""What was found: one table, and the same as JSON."""

import dataclasses
import json
import pathlib
from typing import Any

from benchmarks.gpu.measure import Rates, Times
from benchmarks.gpu.programs import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; None where there is nothing to say.

    Attributes:
      name: of the program.
      microseconds: median, lowest and highest time of one call.
      figure, unit: what is compared with what it should be.
      first, goal: what it should be.
      note: a verdict, or why there is no figure.
    """

    name: str
    microseconds: tuple[float, float, float] | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    figure: float | None = None
    unit: str = ""
    first: float | None = None
    goal: float | None = None
    note: str = ""


class Report:
    """Rows as they come; what there is can be printed at any time."""

    def __init__(self, about: dict[str, Any], file: pathlib.Path | None) -> None:
        self.about = about
        self.rows: list[Row] = []
        self.rates: Rates | None = None
        self._file = file

    @property
    def status(self) -> int:
        """What the process should return: 1 if a kernel is wrong."""
        return int(any(row.note == "WRONG" for row in self.rows))

    def add(self, row: Row) -> None:
        """Take in a row, and write the file anew."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write all there is to the file."""
        if self._file is None:
            return
        rates = self.rates and dataclasses.asdict(self.rates)
        rows = [dataclasses.asdict(row) for row in self.rows]
        content = {"about": self.about, "rates": rates, "rows": rows}
        self._file.write_text(json.dumps(content, indent=1) + "\n")

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        if self.rates is not None:
            lines.append(
                f"measured: copy {self.rates.copy / 1e12:.2f} TB/s, "
                f"product {self.rates.product / 1e12:.0f} TFLOP/s"
            )
        heads = ("what", "us (range)", "TB/s", "TFLOP/s", "figure", "first", "goal", "note")
        lines += ["", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        return "\n".join([*lines, *map(_line, self.rows)])

    def seconds_of(self, name: str) -> float | None:
        """Return the median time of an earlier row, or None."""
        for row in self.rows:
            if row.name == name and row.microseconds:
                return row.microseconds[0] / 1e6
        return None


def timed_row(program: Program, times: Times, report: Report) -> Row:
    """Return the row of a program that was timed."""
    assert report.rates is not None
    read, flops = program.read_bytes / times.median, program.flops / times.median
    parts = [report.seconds_of(name) for name in program.parts]
    together = sum(part for part in parts if part is not None)
    figures = {
        "TB/s": read / 1e12,
        "TFLOP/s": flops / 1e12,
        "% of copy": 100 * read / report.rates.copy,
        "% of floor": 100 * read / report.rates.copy,
        "% of product": 100 * flops / report.rates.product,
        "% of parts": None if None in parts else 100 * together / times.median,
    }
    figure = figures[program.unit]
    return Row(
        program.name,
        tuple(1e6 * each for each in (times.median, times.low, times.high)),
        read / 1e12,
        flops / 1e12,
        figure,
        program.unit,
        program.first,
        program.goal,
        _verdict(figure, program.first, program.goal),
    )


def check_row(program: Program, error: float) -> Row:
    """Return the row of a program that was checked."""
    assert program.tolerance is not None
    note = "right" if error <= program.tolerance else "WRONG"
    return Row(
        f"check: {program.name}",
        figure=error,
        unit="max error",
        first=program.tolerance,
        note=note,
    )


def _verdict(figure: float | None, first: float | None, goal: float | None) -> str:
    if figure is None or first is None or goal is None:
        return ""
    return "goal" if figure >= goal else "first" if figure >= first else "short"


def _line(row: Row) -> str:
    middle = "" if row.microseconds is None else "{:.1f} ({:.1f} to {:.1f})"
    fields = (
        row.name,
        middle.format(*(row.microseconds or ())),
        _number(row.tb_per_s),
        _number(row.tflop_per_s),
        f"{_number(row.figure)} {row.unit}".strip(),
        _number(row.first),
        _number(row.goal),
        row.note,
    )
    return f"| {' | '.join(fields)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
