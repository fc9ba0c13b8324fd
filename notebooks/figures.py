"""How the figures of the notebooks look: one style, one palette, labels instead of legends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which people with any of the common colour blindnesses can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
INK = "#222222"
GREY = "#8A8A8A"
PALE = "#E4E4E4"

_STYLE = {
    "figure.dpi": 120,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
}


def new_figure(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any
) -> tuple[Figure, Any]:
    """Return a figure in the notebooks' style and its axes, as `pyplot.subplots` does.

    Args:
      rows, columns: of the grid of axes.
      size: width and height in inches.
      options: of `pyplot.subplots`.
    """
    plt.rcParams.update(_STYLE)
    return plt.subplots(rows, columns, figsize=size, **options)


def headline(of: "Figure | Axes", text: str) -> None:
    """Write what a whole figure shows above it, or above the only axes that it has."""
    if isinstance(of, Figure):
        of.suptitle(text, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    else:
        of.set_title(text, fontsize=13)


def label(
    axes: "Axes",
    x: float,
    y: float,
    text: str,
    color: str,
    *,
    offset: tuple[float, float] = (6, 0),
    align: str = "left",
    bold: bool = True,
) -> None:
    """Write the name of a line, or a number, next to a point of it in its colour.

    Args:
      axes: with the line.
      x, y: the point, in data coordinates.
      text, color: what to write.
      offset: from the point, in typographic points.
      align: side of the text that lies at the offset.
      bold: for names; numbers are thin and small.
    """
    axes.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        ha=align,
        va="center",
        color=color,
        fontweight="bold" if bold else "normal",
        fontsize=10 if bold else 9,
        annotation_clip=False,
    )


def tint(color: str, share: float) -> tuple[float, float, float]:
    """Return a colour mixed with white; `share` of it is left, 0 to 1."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(color))
    return red, green, blue


def shade_columns(axes: "Axes", edges: Sequence[float], names: Sequence[str]) -> None:
    """Separate the stretches between `edges` along x by lines, and name each above the axes."""
    for edge in edges[1:-1]:
        axes.axvline(edge, color=INK, linewidth=0.8)
    for left, right, name in zip(edges, edges[1:], names, strict=False):
        axes.annotate(
            name,
            ((left + right) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            color=INK,
        )
