"""Pictures of a block pool: every block a square, every block table a row of numbers beside them.

A square is filled as far as its slots hold tokens, in the colours of the requests whose block
tables point to it. A pale square is free but cached, an empty one is free, the hatched one is the
null block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.patheffects import withStroke

import figures
from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.request import Request

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.RED, figures.SKY)

_CHIP = 0.82  # width of an entry of a block table; a block is 1 wide
_UNIT_INCHES = 0.42
_KEY_WIDTH = 20.0
_CACHED = 0.22  # share of the colour that a free, cached block keeps


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block at one moment.

    Attributes:
      owners: names of the requests whose tables hold it; none if it is free.
      num_tokens: slots that hold a token.
      content: name of the request that filled it, None if nobody can find that content.
    """

    owners: tuple[str, ...]
    num_tokens: int
    content: str | None


@dataclass(frozen=True, slots=True)
class Frame:
    """The pool and the block tables at one moment; see `Film.shoot`."""

    caption: str
    blocks: tuple[BlockView, ...]
    tables: tuple[tuple[str, tuple[int, ...], str], ...]  # name, block ids, remark
    free_order: tuple[int, ...] | None
    copies: tuple[tuple[int, int], ...]


class Film:
    """Moments in the life of a pool, to be drawn below each other (mutable).

    Args:
      pool: what is filmed.
      names: of the requests that will appear; each gets a colour.
    """

    def __init__(self, pool: BlockPool, names: Sequence[str]) -> None:
        self.frames: list[Frame] = []
        self._pool = pool
        self._colors = dict(zip(names, COLORS, strict=False))
        self._authors: dict[int, str] = {}
        self._name_width = 0.8 + 0.38 * max(map(len, names))

    def note_owners(self, requests: Mapping[str, Request], *, groups: Sequence[str] = ()) -> None:
        """Remember who fills which block, for the colours of blocks that are free later."""
        self._authors |= {
            block_id: name
            for name, _, table in reversed(list(_named_tables(requests, groups)))
            for block_id in table
        }

    def shoot(
        self,
        caption: str,
        requests: Mapping[str, Request],
        *,
        remarks: Mapping[str, str] | None = None,
        groups: Sequence[str] = (),
        with_free_order: bool = False,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Frame:
        """Keep how the pool looks now.

        Args:
          caption: what has happened.
          requests: by name; those without blocks are listed with their remark alone.
          remarks: further words beside a block table.
          groups: names for the cache groups of the one request there is, instead of its own.
          with_free_order: show the free blocks in the order in which they will be taken.
          copies: (source, destination) of blocks that this step copies.
        """
        pool = self._pool
        self.note_owners(requests, groups=groups)
        owners: dict[int, list[str]] = {}
        filled: dict[int, int] = {}
        tables: list[tuple[str, tuple[int, ...], str]] = []
        for name, request, table in _named_tables(requests, groups):
            remark = (remarks or {}).get(name, "")
            if table or remark:
                tables.append((name, tuple(table), remark))
            for index, block_id in enumerate(table):
                owners.setdefault(block_id, []).append(name)
                held = request.num_computed_tokens - index * pool.block_size
                held = min(max(held, 0), pool.block_size)
                filled[block_id] = max(held, filled.get(block_id, 0))
        owners.pop(NULL_BLOCK, None)
        blocks = tuple(
            BlockView(
                tuple(owners.get(block_id, ())),
                filled.get(block_id, 0),
                None if pool.block_hash(block_id) is None else self._authors[block_id],
            )
            for block_id in range(pool.num_blocks)
        )
        order = tuple(pool.free_order()) if with_free_order else None
        frame = Frame(caption, blocks, tuple(tables), order, tuple(copies))
        self.frames.append(frame)
        return frame

    def draw(self, title: str, *, table_width: int = 6) -> "Figure":
        """Return a figure of all frames, the first on top.

        Args:
          title: what they show together.
          table_width: entries that the widest block table needs room for.
        """
        num_blocks = self._pool.num_blocks
        width = max(num_blocks + self._name_width + 1.2 + table_width * _CHIP, _KEY_WIDTH)
        heights = [_height(frame) for frame in self.frames]
        total = sum(heights) + 1.2
        headroom = 0.45  # inches
        size = (width * _UNIT_INCHES, total * _UNIT_INCHES + headroom)
        figure, axes = figures.new_figure(size=size, layout="none")
        axes.set_position((0.0, 0.0, 1.0, 1 - headroom / size[1]))
        axes.set(xlim=(0, width), ylim=(-total, 0), aspect="equal")
        axes.axis("off")
        axes.set_title(title, fontsize=13)
        top = 0.0
        for number, (frame, height) in enumerate(zip(self.frames, heights, strict=True), 1):
            if number > 1:
                axes.plot([0, width], [-top + 0.05] * 2, color=figures.PALE, linewidth=0.8)
            axes.text(
                0, -top - 0.5, f"{number}  {frame.caption}", va="center", fontsize=10,
                color=figures.INK,
            )  # fmt: skip
            self._draw_frame(axes, frame, -top - 2.0)
            top += height
        self._draw_key(axes, -top - 0.95)
        return figure

    def _draw_frame(self, axes: "Axes", frame: Frame, bottom: float) -> None:
        """Draw blocks, tables and free order; `bottom` is the lower edge of the squares."""
        for block_id, block in enumerate(frame.blocks):
            self._draw_block(axes, block_id, bottom, block, str(block_id))
        for source, destination in frame.copies:
            arrow = FancyArrowPatch(
                (source + 0.5, bottom - 0.02), (destination + 0.5, bottom - 0.02),
                connectionstyle="arc3,rad=0.35", arrowstyle="-|>", mutation_scale=11,
                color=figures.INK, linewidth=1.2,
            )  # fmt: skip
            axes.add_patch(arrow)
            axes.text(
                (source + destination) / 2 + 0.5, bottom - 0.62, "copy", ha="center",
                va="center", fontsize=8, color=figures.INK,
            )  # fmt: skip
        left = len(frame.blocks) + self._name_width
        for row, (name, table, remark) in enumerate(frame.tables):
            self._draw_table(axes, left, bottom + 0.12 - row * 0.95, name, table, remark)
        if frame.free_order is not None:
            self._draw_free_order(axes, frame, bottom - 1.05)

    def _draw_block(
        self, axes: "Axes", left: float, bottom: float, block: BlockView, text: str
    ) -> None:
        size = 0.92
        edge, ink = figures.GREY, figures.GREY
        if block.owners:
            share = block.num_tokens / self._pool.block_size
            stripe = size / len(block.owners)
            for index, owner in enumerate(block.owners):
                color = self._colors[owner]
                x = left + index * stripe
                axes.add_patch(
                    Rectangle((x, bottom), stripe, size, color=figures.tint(color, 0.1), lw=0)
                )
                axes.add_patch(Rectangle((x, bottom), stripe, size * share, color=color, lw=0))
            edge, ink = figures.INK, figures.INK if share < 1 or len(block.owners) > 1 else "white"
        elif block.content is not None:
            color = self._colors[block.content]
            axes.add_patch(
                Rectangle((left, bottom), size, size, color=figures.tint(color, _CACHED), lw=0)
            )
            ink = figures.INK
        outline = Rectangle((left, bottom), size, size, fill=False, edgecolor=edge, linewidth=0.9)
        if text == str(NULL_BLOCK):
            outline.set(hatch="////", edgecolor=figures.GREY)
            text = ""
        axes.add_patch(outline)
        axes.text(
            left + size / 2, bottom + size / 2, text, ha="center", va="center", fontsize=9,
            color=ink, fontweight="bold" if block.owners else "normal",
            path_effects=[withStroke(linewidth=2.5, foreground="white")] if ink != "white" else [],
        )  # fmt: skip

    def _draw_table(
        self, axes: "Axes", left: float, bottom: float, name: str, table: Sequence[int], remark: str
    ) -> None:
        color = self._colors[name]
        middle = bottom + 0.34
        axes.text(
            left, middle, name, ha="right", va="center", color=color, fontsize=11,
            fontweight="bold",
        )  # fmt: skip
        left += 0.3
        for block_id in table:
            is_null = block_id == NULL_BLOCK
            axes.add_patch(
                Rectangle(
                    (left, bottom), _CHIP * 0.92, 0.68, linewidth=1,
                    edgecolor=figures.GREY if is_null else color,
                    facecolor="white" if is_null else figures.tint(color, 0.12),
                    hatch="////" if is_null else None,
                )
            )  # fmt: skip
            axes.text(
                left + _CHIP * 0.46, middle, "" if is_null else str(block_id), ha="center",
                va="center", fontsize=9, color=figures.INK,
            )  # fmt: skip
            left += _CHIP
        if remark:
            axes.text(left + 0.1, middle, remark, va="center", fontsize=9, color=figures.INK)

    def _draw_free_order(self, axes: "Axes", frame: Frame, bottom: float) -> None:
        assert frame.free_order is not None
        axes.text(0, bottom + 0.34, "taken next", va="center", fontsize=9, color=figures.INK)
        left = 2.6
        for block_id in frame.free_order:
            content = frame.blocks[block_id].content
            face = figures.tint(self._colors[content], _CACHED) if content else "white"
            axes.add_patch(
                Rectangle(
                    (left, bottom), _CHIP * 0.92, 0.68, facecolor=face, edgecolor=figures.GREY,
                    linewidth=0.9,
                )
            )  # fmt: skip
            axes.text(
                left + _CHIP * 0.46, bottom + 0.34, str(block_id), ha="center", va="center",
                fontsize=9, color=figures.INK,
            )  # fmt: skip
            left += _CHIP

    def _draw_key(self, axes: "Axes", bottom: float) -> None:
        """Explain the squares below the frames."""
        names = list(self._colors)
        first, second = names[0], names[1] if len(names) > 1 else names[0]
        size = self._pool.block_size
        entries = [
            (BlockView((first,), size, None), "full"),
            (BlockView((first,), size // 2, None), "half full"),
            (BlockView((first, second), size, None), "shared"),
            (BlockView((), 0, first), "free, cached"),
            (BlockView((), 0, None), "free"),
        ]
        left = 0.0
        for block, text in entries:
            self._draw_block(axes, left, bottom, block, " ")
            axes.text(left + 1.1, bottom + 0.46, text, va="center", fontsize=9, color=figures.INK)
            left += 1.9 + 0.2 * len(text)
        self._draw_block(axes, left, bottom, BlockView((), 0, None), str(NULL_BLOCK))
        axes.text(
            left + 1.1, bottom + 0.46, "null block", va="center", fontsize=9, color=figures.INK
        )


def _named_tables(
    requests: Mapping[str, Request], groups: Sequence[str]
) -> Iterator[tuple[str, Request, list[int]]]:
    """Yield each block table with its request and the name it goes by."""
    for name, request in requests.items():
        for group, table in enumerate(request.block_tables):
            yield groups[group] if groups else name, request, table


def _height(frame: Frame) -> float:
    """Return the height of a frame in widths of a block."""
    below = 1.05 if frame.free_order is not None else 0.55 if frame.copies else 0.0
    rows = max(0.0, (len(frame.tables) - 1) * 0.95)
    return 2.3 + max(below, rows)
