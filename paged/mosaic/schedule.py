"""Which items a program works on: the same answer for all of its warpgroups."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from paged.mosaic.refs import Inputs
from paged.mosaic.spec import ROW_UNIT, AttentionSpec


def divide(a: Array, b: int) -> Array:
    """Return the quotient of two numbers that are not negative, without a test of the sign."""
    return lax.div(a, jnp.int32(b))


def divide_up(a: Array, b: int) -> Array:
    """Return the quotient, rounded up."""
    return divide(a + (b - 1), b)


def remainder(a: Array, b: int) -> Array:
    """Return the remainder of two numbers that are not negative."""
    return lax.rem(a, jnp.int32(b))


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """An item of the plan, for one tile of q heads; all int32 scalars.

    Attributes:
      first_head: q head of the first slab.
      kv_head: the kv head of all slabs.
      row: first query row of the tile, a multiple of the rows of an item.
      low, high: first and end of the rows that are the sequence's own.
      offset: what to add to a row to get its position.
      seq: sequence.
      first_key, end_key: keys that the rows see.
      context: context length.
      origin: key that the first tile of keys starts with.
      num_tiles: tiles of keys.
    """

    first_head: Array
    kv_head: Array
    row: Array
    low: Array
    high: Array
    offset: Array
    seq: Array
    first_key: Array
    end_key: Array
    context: Array
    origin: Array
    num_tiles: Array


class Schedule:
    """The work of this program, in order."""

    def __init__(self, inputs: Inputs, spec: AttentionSpec) -> None:
        self._items = inputs.items
        self._spec = spec
        self._num_work = inputs.num_live[0] * spec.num_head_tiles
        self._program = lax.axis_index("program")

    def for_each(self, do: Callable[[Work, Array], Array]) -> None:
        """Call `do(work, step)` for each piece of work in order.

        Args:
          do: returns the step of the next piece: steps number the tiles of keys of a program.
        """
        programs = self._spec.num_programs

        def round_(index: Array, step: Array) -> Array:
            # The longest come first. Every other round is dealt out backwards, or the first
            # program would get the longest piece of each.
            is_back = remainder(index, 2) == 1
            place = jnp.where(is_back, programs - 1 - self._program, self._program)
            piece = index * programs + place
            return lax.cond(
                piece < self._num_work, lambda: do(self._work(piece), step), lambda: step
            )

        lax.fori_loop(0, divide_up(self._num_work, programs), round_, jnp.int32(0))

    def _work(self, piece: Array) -> Work:
        spec = self._spec
        item, head_tile = divide(piece, spec.num_head_tiles), remainder(piece, spec.num_head_tiles)
        fields: list[Any] = [self._items[item, field] for field in range(8)]
        row, low, high, offset, seq, first_key, end_key, context = fields
        origin = divide(first_key, spec.copy_keys) * spec.copy_keys
        return Work(
            first_head=head_tile * spec.folding.num_heads,
            kv_head=divide(head_tile, spec.tiles_per_kv_head),
            row=pl.multiple_of(row, ROW_UNIT),
            low=low,
            high=high,
            offset=offset,
            seq=seq,
            first_key=first_key,
            end_key=end_key,
            context=context,
            origin=origin,
            num_tiles=divide_up(end_key - origin, spec.tile_keys),
        )
