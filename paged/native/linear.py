"""Linear layers on packed weights: the layout, and the calls of the kernels.

A weight `[N, K]` is packed once into `[ceil(N / 64), steps, 64, elements]`, 64 outputs side by side
for each step along K, so that a product reads it once and in order. A step is 32 bit of each
output: one float32, two bfloat16, which is what the dot product of AVX512-BF16 takes, four int8 or
e4m3, or eight codes of 4 bits. N and K are padded with zeros.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

TARGET = "paged_linear"
"""Name under which XLA knows the kernel of linear layers."""

BEST_TARGET = "paged_linear_best"
"""Name under which XLA knows the kernel that keeps the best output only."""

ROWS_TARGET = "paged_linear_rows"
"""Name under which XLA knows the kernel that takes rows out of a packed weight."""

TILE = 64
"""Outputs side by side in a packed weight."""

DTYPES = ("bfloat16", "float32")
"""Element types that the kernels compute in; a weight has the same, or fewer bits."""

ACTIVATIONS = ("silu", "gelu_tanh")
"""What a gate may go through."""

# Rows of codes that are put in order at once: little memory beside a weight.
_ORDERED_ROWS = 1024

_ELEMENTS = {
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(np.float32): 1,
    np.dtype(np.int8): 4,
    np.dtype(ml_dtypes.float8_e4m3fn): 4,
    np.dtype(np.uint8): 4,  # two codes of 4 bits each, see `in_order_of_words`
}


class PackedWeight(NamedTuple):
    """A packed weight and what belongs to it.

    Attributes:
      words: the weight, see `pack`.
      num_outputs: N, without padding.
      scales: float32, what a weight in fewer than 16 bits is multiplied by: `[num_outputs]`, or
        `[num_groups, num_outputs]` for codes of 4 bits; None for other types.
      bias: `[num_outputs]`, of the input's type, or None.
      zeros: uint8 `[num_groups, num_outputs]`, what such codes are less by; None: 8.
      order: int32 `[K]`, where inputs are to be taken from before the product; None: as they are.
    """

    words: Array | np.ndarray
    num_outputs: int
    scales: Array | np.ndarray | None = None
    bias: Array | np.ndarray | None = None
    zeros: Array | np.ndarray | None = None
    order: Array | np.ndarray | None = None

    def operands(self) -> list[Array | np.ndarray]:
        """Return what a kernel reads, in its order."""
        return [
            operand
            for operand in (self.words, self.scales, self.zeros, self.bias)
            if operand is not None
        ]


class PackedNorm(NamedTuple):
    """RMSNorm of the input.

    Attributes:
      weight: `[K]`, of `dtype` or float32.
      epsilon: added to the mean square.
      dtype: what the normalised input is rounded to; None: the input's own type. Only float32 has
        another to be rounded to.
    """

    weight: Array | np.ndarray
    epsilon: float
    dtype: str | np.dtype | None = None


def packed_shape(num_outputs: int, num_inputs: int, dtype: np.dtype) -> tuple[int, int, int, int]:
    """Return the packed shape of a weight `[num_outputs, num_inputs]`.

    Raises:
      ValueError: for an element type that the kernels do not have.
    """
    elements = _ELEMENTS.get(dtype)
    if elements is None:
        raise ValueError(f"dtype={dtype} has no native kernel; choose one of {', '.join(DTYPES)}.")
    return -(-num_outputs // TILE), -(-num_inputs // elements), TILE, elements


def pack(weight: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return a weight `[N, K]` in the packed layout.

    Args:
      weight: the weight.
      out: where to put it, of the packed shape and the weight's type; None takes new memory.

    Raises:
      ValueError: for an element type that the kernel does not have.
    """
    num_outputs, num_inputs = weight.shape
    shape = packed_shape(num_outputs, num_inputs, weight.dtype)
    tiles, steps, _, elements = shape
    packed = np.empty(shape, weight.dtype) if out is None else out
    assert (packed.shape, packed.dtype) == (shape, weight.dtype)
    # As 32-bit words, which numpy moves in one piece.
    words = packed.view(np.uint32).reshape(tiles, steps, TILE)
    if (num_outputs, num_inputs) != (tiles * TILE, steps * elements):
        padded = np.zeros((tiles * TILE, steps * elements), weight.dtype)
        padded[:num_outputs, :num_inputs] = weight
        weight = padded
    source = np.ascontiguousarray(weight).view(np.uint32).reshape(tiles, TILE, steps)
    for tile in range(tiles):
        words[tile] = source[tile].T
    return packed


def in_order_of_words(values: np.ndarray, group_size: int) -> np.ndarray:
    """Return codes of 4 bits as `pack` is to have them, from `paged.int4_product`'s order.

    Args:
      values: uint8 `[N, K / 2]`; byte i of a group holds its inputs i and i + half.
      group_size: inputs of a group, a multiple of 8.

    Returns:
      uint8 `[N, K / 2]`; four bytes hold eight neighbours: 0, 2, 4, 6, then 1, 3, 5, 7.
    """
    out = np.empty_like(values)
    for start in range(0, len(values), _ORDERED_ROWS):
        part = values[start : start + _ORDERED_ROWS]
        grouped = part.reshape(len(part), -1, group_size // 2)
        codes = np.concatenate([grouped & 15, grouped >> 4], axis=2).reshape(len(part), -1, 4, 2)
        # [rows, words, which of a pair, pair]: nibbles from low to high.
        nibbles = codes.swapaxes(2, 3).reshape(len(part), -1, 4, 2)
        words = nibbles[..., 0] | (nibbles[..., 1] << 4)
        out[start : start + _ORDERED_ROWS] = words.reshape(len(part), -1)
    return out


def is_packed(weight: Array) -> bool:
    """Return whether a weight is in the packed layout: it alone has four axes."""
    return weight.ndim == 4


def packed_linear(
    x: Array | np.ndarray,
    weights: Sequence[PackedWeight],
    *,
    norm: PackedNorm | None = None,
    activation: str | None = None,
    residual: Array | np.ndarray | None = None,
    num_rows: Array | np.ndarray | None = None,
    out_dtype: str | np.dtype | None = None,
    level: int = -1,
) -> tuple[Array, ...]:
    """Return `norm(x) @ weight.T + bias` for each weight, in one call; needs `load_library`.

    Sums are float32, and what follows them is computed in float32 before the result is rounded.

    Args:
      x: `[M, K]`.
      weights: at most four, all of one type.
      norm: what x goes through first; what is said of x's type below is then of the norm's. None:
        nothing.
      activation: one of `ACTIVATIONS`; the only result is then `activation(y0) * y1` of two
        weights' products.
      residual: `[M, N]`, of `out_dtype`, added to the first result.
      num_rows: int32 `[1]`, how many rows there are; those after them are padding, whose results
        are zero and take no time. None: M.
      out_dtype: x's element type, the default, or float32.
      level: index in `paged.native.library.LEVELS` of the instructions to use; -1: the best.
    """
    in_dtype = x.dtype if norm is None else jnp.dtype(norm.dtype or x.dtype)
    dtype = jnp.dtype(out_dtype or in_dtype)
    outputs = weights if activation is None else weights[:1]
    shapes = [_shape((x.shape[0], weight.num_outputs), dtype) for weight in outputs]
    assert all(weight.order is None for weight in weights), "the caller puts inputs in order"
    operands = [operand for weight in weights for operand in weight.operands()]
    if norm is not None:
        operands.append(norm.weight)
        # Nobody reads the normalised x, but XLA plans its memory with that of all temporaries.
        shapes.append(_shape(x.shape, in_dtype))
    if residual is not None:
        operands.append(residual)
    if num_rows is not None:
        operands.append(num_rows)
    results: tuple[Array, ...] = tuple(
        jax.ffi.ffi_call(TARGET, shapes)(
            x,
            *operands,
            num_weights=np.int32(len(weights)),
            zeros=np.int32(sum((w.zeros is not None) << i for i, w in enumerate(weights))),
            biases=np.int32(sum((w.bias is not None) << i for i, w in enumerate(weights))),
            epsilon=np.float32(-1 if norm is None else norm.epsilon),
            has_residual=residual is not None,
            has_num_rows=num_rows is not None,
            activation=np.int32(0 if activation is None else 1 + ACTIVATIONS.index(activation)),
            level=np.int32(level),
        )
    )
    return results[: len(outputs)]


def packed_best(
    x: Array | np.ndarray,
    weight: PackedWeight,
    *,
    level: int = -1,
) -> Array:
    """Return where each row of `x @ weight.T` in float32 has its largest element, int32 `[n]`.

    Of equal elements the first is taken, and of a row with a NaN the last element. The products are
    compared as they are computed and written nowhere. Needs `load_library`.

    Args:
      x: `[n, K]`.
      weight: without a bias.
      level: index in `paged.native.library.LEVELS` of the instructions to use; -1: the best.
    """
    partial = (weight.words.shape[0], x.shape[0])  # the best of each tile, for the kernel's use
    best: Array = jax.ffi.ffi_call(
        BEST_TARGET,
        [
            _shape(x.shape[:1], np.int32),
            _shape(partial, np.float32),
            _shape(partial, np.int32),
        ],
    )(
        x,
        *weight.operands(),
        num_outputs=np.int32(weight.num_outputs),
        has_zeros=weight.zeros is not None,
        level=np.int32(level),
    )[0]
    return best


def _shape(shape: tuple[int, ...], dtype: np.dtype | type) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def packed_rows(packed: Array, rows: Array, *, num_inputs: int) -> Array:
    """Return rows `[n, num_inputs]` of the weight `[N, num_inputs]` that was packed.

    Rows are gathered where they lie, so that an embedding that is also the head needs no second
    copy. A row number beyond the last is clamped. Needs `load_library`: XLA takes 70 to 700 ms for
    what 1,024 rows of 576 take the kernel 2.
    """
    shape = _shape((rows.shape[0], num_inputs), packed.dtype)
    gathered: Array = jax.ffi.ffi_call(ROWS_TARGET, shape)(packed, rows.astype(np.int32))
    return gathered
