"""Charts as SVG, for a page that needs nothing else: lines, steps or dots over two axes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 16, 14, 50
_COLORS = 5  # of the page; further series have them again, dashed
_MAX_POINTS = 800
_TICKS = 5

type Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """Points with a name.

    Attributes:
      name: for the legend.
      points: x and y.
      kind: "line" (with dots while there are few), "step" (a value holds until the next) or "dots".
    """

    name: str
    points: Points
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """A chart; axes start at 0 unless `log_x`.

    Attributes:
      title, x_label, y_label: texts.
      series: drawn in this order; their colours are those of the page.
      mark: a value of x with a name, as a vertical line.
      log_x: a logarithmic x axis; all x must be positive.
      y_max: where the y axis ends; by default where the points do.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    mark: tuple[float, str] | None = None
    log_x: bool = False
    y_max: float | None = None

    def figure(self) -> str:
        """Return the chart with its title and, of several series, a legend, as a `<figure>`.

        These are no part of the drawing, so that they wrap, and stay legible on a narrow page.
        """
        drawn = self._drawn
        legend = "".join(
            f'<li><svg class="key" viewBox="0 0 18 8" aria-hidden="true"><path '
            f'class="{_line_class(index)}" d="M0 4H18"/></svg>{escape(each.name)}</li>'
            for index, each in enumerate(drawn)
        )
        keys = f"<ul>{legend}</ul>" if len(drawn) > 1 else ""
        return f"<figure><figcaption>{escape(self.title)}</figcaption>{keys}{self.svg()}</figure>"

    @property
    def _drawn(self) -> list[Series]:
        return [each for each in self.series if each.points]

    def svg(self) -> str:
        """Return the chart as an `<svg>` element; one that says so if there is nothing to draw."""
        drawn = self._drawn
        xs = [x for each in drawn for x, _ in each.points]
        ys = [y for each in drawn for _, y in each.points]
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)}">',
        ]
        if xs:
            axes = _Axes(xs, self.y_max or max(ys), log_x=self.log_x)
            parts += axes.grid(self.x_label, self.y_label)
            for index, each in enumerate(drawn):
                parts += _draw(each, index, axes, self)
            if self.mark is not None:
                parts += _vertical(axes, *self.mark)
        else:
            parts.append(f'<text x="{_LEFT}" y="{HEIGHT // 2}">nothing was measured</text>')
        return "\n".join([*parts, "</svg>"])


class _Axes:
    """From values to pixels."""

    def __init__(self, xs: Sequence[float], y_max: float, *, log_x: bool) -> None:
        self._log_x = log_x
        self._y_ticks = _ticks(y_max)
        self._y_end = self._y_ticks[-1]
        if log_x:
            self._x_ticks = sorted(set(xs))
            self._x_start, self._x_end = math.log(min(xs)), math.log(max(xs))
        else:
            self._x_ticks = _ticks(max(xs))
            self._x_start, self._x_end = 0.0, max(*xs, self._x_ticks[-2], 1e-9)

    def x(self, value: float) -> float:
        place = math.log(value) if self._log_x else value
        span = self._x_end - self._x_start
        share = (place - self._x_start) / span if span else 0.5
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = min(1.0, value / self._y_end)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self, x_label: str, y_label: str) -> list[str]:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for value in self._y_ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{right}"/>')
            parts.append(
                f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{y + 4}">{value:g}</text>'
            )
        parts += [
            f'<text class="tick" text-anchor="middle" x="{x}" y="{bottom + 18}">{value:g}</text>'
            for value in self._x_ticks
            if (x := self.x(value)) <= right + 1
        ]
        middle = (_TOP + bottom) / 2
        parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
        parts.append(
            f'<text class="label" text-anchor="middle" x="{(_LEFT + right) / 2}" '
            f'y="{HEIGHT - 7}">{escape(x_label)}</text>'
        )
        parts.append(
            f'<text class="label" text-anchor="middle" transform="translate(14 {middle}) '
            f'rotate(-90)">{escape(y_label)}</text>'
        )
        return parts


def steps(points: Points) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps each value until the next point."""
    corners = [points[0]]
    for (_, before), (x, y) in itertools.pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return which share of the values, in percent, is at most x, from 0 at the least."""
    ordered = np.sort(np.asarray(values, np.float64)).tolist()
    if not ordered:
        return []
    shares = (100 * np.arange(1, len(ordered) + 1) / len(ordered)).tolist()
    return [(ordered[0], 0.0), *zip(ordered, shares, strict=True)]


def _draw(series: Series, index: int, axes: _Axes, chart: Chart) -> list[str]:
    every = max(1, math.ceil(len(series.points) / _MAX_POINTS))
    shown = [*series.points[::every]]
    if shown[-1] != series.points[-1]:
        shown.append(series.points[-1])
    parts = []
    if series.kind != "dots":
        corners = steps(shown) if series.kind == "step" else shown
        path = "L".join(f"{axes.x(x)} {axes.y(y)}" for x, y in corners)
        parts.append(f'<path class="{_line_class(index)}" d="M{path}"/>')
    if series.kind == "dots" or (series.kind == "line" and len(shown) <= 2 * _TICKS + 2):
        parts += [
            f'<circle class="dot c{index % _COLORS}" cx="{axes.x(x)}" cy="{axes.y(y)}" r="3">'
            f"<title>{escape(series.name)}: {x:.4g} {escape(chart.x_label)}, "
            f"{y:.4g} {escape(chart.y_label)}</title></circle>"
            for x, y in shown
        ]
    return parts


def _line_class(index: int) -> str:
    dashed = " dashed" if index >= _COLORS else ""
    return f"line c{index % _COLORS}{dashed}"


def _vertical(axes: _Axes, value: float, name: str) -> list[str]:
    x = axes.x(value)
    anchor, shift = ("end", -5) if x > WIDTH / 2 else ("start", 5)
    return [
        f'<path class="mark" d="M{x} {_TOP}V{HEIGHT - _BOTTOM}"/>',
        f'<text class="tick" text-anchor="{anchor}" x="{x + shift}" y="{_TOP + 12}">'
        f"{escape(name)}</text>",
    ]


def _ticks(largest: float) -> list[float]:
    """Return round numbers from 0 to the first that is not below the largest."""
    if not largest > 0:
        return [0.0, 1.0]
    rough = largest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999999)
    return [round(k * step, 12) for k in range(math.ceil(largest / step - 1e-9) + 1)]
