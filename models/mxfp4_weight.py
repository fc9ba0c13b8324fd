"""`Mxfp4Weight`: weights of 4 bits with a power of two for each 32 of them, as gpt-oss has them.

They stay packed in memory; a product widens the one matrix that it multiplies.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from paged.models.parameters import parameter
from paged.native.linear import PackedWeight

GROUP_SIZE = 32
"""Inputs that share a scale."""

_CANNOT_PACK = "MXFP4 weights cannot be packed; check can_pack first."
_BYTES = GROUP_SIZE // 2
# 2 ** -4, the scale of a random weight.
_RANDOM_SCALE = 127 - 4


class Mxfp4Weight(nnx.Module):
    """A weight in MXFP4: elements E2M1, scales E8M0; a `QuantizedWeight`.

    Attributes:
      values: uint8 `[..., num_outputs, num_groups, 16]`, two elements a byte, the lower bits first.
      scales: uint8 `[..., num_outputs, num_groups]`, exponents of two plus 127.

    Args:
      axes: name and size of each axis of the weight, outputs before inputs; a product takes a
        weight of two axes.
      rngs: source of the initial elements.

    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """

    can_pack: ClassVar[bool] = False

    def __init__(self, axes: dict[str, int], *, rngs: nnx.Rngs) -> None:
        *others, num_inputs = axes.values()
        if num_inputs % GROUP_SIZE:
            raise ValueError(
                f"axis {list(axes)[-1]!r} has {num_inputs} features, which MXFP4 cannot cut into "
                f"groups of {GROUP_SIZE}."
            )
        groups = (*others, num_inputs // GROUP_SIZE)
        values = jax.random.bits(rngs.params(), (*groups, _BYTES), jnp.uint8)
        self.values = parameter(values, (*axes, None))
        self.scales = parameter(jnp.full(groups, _RANDOM_SCALE, jnp.uint8), tuple(axes))

    def matrix(self) -> np.ndarray:
        """Raise: the native kernels have no product with such weights."""
        raise NotImplementedError(_CANNOT_PACK)

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product `[num_rows, num_outputs]` of x `[num_rows, K]`, by XLA."""
        weight = widen(self.values[...], self.scales[...], x.dtype).reshape(num_outputs, -1)
        return jnp.einsum("TD,FD->TF", x, weight, preferred_element_type=jnp.float32)

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows `[n, num_inputs]` of the weight."""
        values, scales = (
            part[...].at[rows].get(mode="clip") for part in (self.values, self.scales)
        )
        return widen(values, scales, dtype).reshape(-1, num_inputs)

    def packed(self, num_outputs: int) -> PackedWeight:
        """Raise: the native kernels have no product with such weights."""
        raise NotImplementedError(_CANNOT_PACK)


def widen(values: Array, scales: Array, dtype: np.dtype) -> Array:
    """Return elements `[..., num_groups, 32]`; float32 and bfloat16 hold them exactly."""
    codes = jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], GROUP_SIZE)
    exponent, mantissa = ((codes >> 1) & 3).astype(jnp.int32), (codes & 1).astype(jnp.int32)
    # Twice the size: 0, 1; 2, 3; 4, 6; 8, 12. Arithmetic, as lookups in a table are slower.
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    signed = jnp.where(codes & 8, -doubled, doubled).astype(jnp.float32)
    # The exponent's place in a float32. Of 0, 2 ** -127, this makes zero.
    scale = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    return (signed * (scale[..., None] * 0.5)).astype(dtype)
