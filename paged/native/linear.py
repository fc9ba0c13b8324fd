"""Linear layers on packed weights: the layout, and the call of the kernel.

A weight `[N, K]` is packed once into `[ceil(N / 64), steps, 64, elements]`, 64 outputs side by side
for each step along K, so that a product reads it once and in order. A step is 32 bit of each
output: one float32, or two bfloat16, which is what the dot product of AVX512-BF16 takes. N and K
are padded with zeros.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

TARGET = "paged_linear"
"""Name under which XLA knows the kernel."""

TILE = 64
"""Outputs side by side in a packed weight."""

DTYPES = ("bfloat16", "float32")
"""Element types that the kernel has; x and the weight must have the same."""

_ELEMENTS = {np.dtype(ml_dtypes.bfloat16): 2, np.dtype(np.float32): 1}


def packed_shape(num_outputs: int, num_inputs: int, dtype: np.dtype) -> tuple[int, int, int, int]:
    """Return the packed shape of a weight `[num_outputs, num_inputs]`.

    Raises:
      ValueError: for an element type that the kernel does not have.
    """
    elements = _ELEMENTS.get(dtype)
    if elements is None:
        raise ValueError(f"dtype={dtype} has no native kernel; choose one of {', '.join(DTYPES)}.")
    return -(-num_outputs // TILE), -(-num_inputs // elements), TILE, elements


def pack(weight: np.ndarray) -> np.ndarray:
    """Return a weight `[N, K]` in the packed layout, in memory of its own.

    Raises:
      ValueError: for an element type that the kernel does not have.
    """
    num_outputs, num_inputs = weight.shape
    shape = packed_shape(num_outputs, num_inputs, weight.dtype)
    tiles, steps, _, elements = shape
    packed = np.empty(shape, weight.dtype)
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


def is_packed(weight: Array) -> bool:
    """Return whether a weight is in the packed layout: it alone has four axes."""
    return weight.ndim == 4


def packed_linear(
    x: Array | np.ndarray,
    packed: Array | np.ndarray,
    bias: Array | None = None,
    *,
    num_outputs: int,
    out_dtype: str | np.dtype | None = None,
    level: int = -1,
) -> Array:
    """Return `x @ weight.T + bias`, accumulated in float32; needs `load_library`.

    Args:
      x: `[num_rows, K]`.
      packed: the weight, see `pack`; of x's element type.
      bias: `[num_outputs]`, of x's element type, or None.
      num_outputs: N, without padding.
      out_dtype: x's element type, the default, or float32.
      level: index in `paged.native.library.LEVELS` of the instructions to use; -1: the best.
    """
    shape = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (x.shape[0], num_outputs), jnp.dtype(out_dtype or x.dtype)
    )
    operands = (x, packed) if bias is None else (x, packed, bias)
    y: Array = jax.ffi.ffi_call(TARGET, shape)(*operands, level=np.int32(level))
    return y


def packed_rows(packed: Array, rows: Array, *, num_inputs: int) -> Array:
    """Return rows `[n, num_inputs]` of the weight `[N, num_inputs]` that was packed.

    Rows are gathered where they lie, so that an embedding that is also the head needs no second
    copy. A row number beyond the last is clamped.
    """
    tiles, _, tile, _ = packed.shape
    rows = jnp.clip(rows, 0, tiles * tile - 1)
    return packed[rows // tile, :, rows % tile].reshape(rows.shape[0], -1)[:, :num_inputs]
