"""How the weight of a linear layer is stored, and the only functions that look at that.

A weight `[N, K]`, N outputs, is a parameter of the model's own element type, or a `QuantizedWeight`
of another format, a module with parameters of its own. Either may be packed for the native CPU
kernels (`paged.models.linear_packing`); it has four axes then, as no other weight has.
"""

from typing import ClassVar, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.models.parameters import parameter
from paged.native.linear import PackedWeight, is_packed, packed_rows


class QuantizedWeight(Protocol):
    """A weight in fewer bits than a product is computed in.

    Attributes:
      values: the parameter that is packed.
    """

    values: nnx.Param[Array]

    @property
    def can_pack(self) -> bool:
        """Whether the native kernels multiply it."""

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product `[num_rows, num_outputs]` of x `[num_rows, K]`, by XLA."""

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows `[n, num_inputs]` of the weight."""

    def packed(self, num_outputs: int) -> PackedWeight:
        """Return what the native kernels take, once `values` are packed."""


type StoredWeight = nnx.Param[Array] | QuantizedWeight


class Int8Weight(nnx.Module):
    """A weight as int8 and one float32 scale for each output: `values * scales`.

    Symmetric: an output's largest weight becomes 127 or -127. Activations stay as they are.

    Args:
      weight: the parameter to quantise.
      num_output_axes: how many of its axes, the first, are outputs.
    """

    can_pack: ClassVar[bool] = True

    def __init__(self, weight: nnx.Param[Array], num_output_axes: int) -> None:
        axes = weight.get_metadata("out_sharding")
        parts = self.quantize(weight[...], num_output_axes)
        self.values = parameter(parts["values"], axes)
        self.scales = parameter(parts["scales"], axes[:num_output_axes])

    @staticmethod
    def quantize(weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the values and the scales of a weight, by name."""
        wide = weight.astype(jnp.float32)
        input_axes = tuple(range(num_output_axes, weight.ndim))
        scales = jnp.abs(wide).max(axis=input_axes, keepdims=True) / 127
        # An output without weights has the scale 0; anything is divided by 1 instead.
        values = jnp.round(wide / jnp.where(scales == 0, 1, scales))
        # Never -128: the kernels have no table entry for it.
        values = jnp.clip(values, -127, 127).astype(jnp.int8)
        return {"values": values, "scales": scales.reshape(weight.shape[:num_output_axes])}

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product of x, by XLA: int8 is exact in any type that x has."""
        values = self.values[...].reshape(num_outputs, -1).astype(x.dtype)
        y = jnp.einsum("TD,FD->TF", x, values, preferred_element_type=jnp.float32)
        return y * self.scales[...].reshape(1, -1)

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows of the weight."""
        values = _rows(self.values[...], rows, num_inputs).astype(jnp.float32)
        scales = jnp.take(self.scales[...], rows, mode="clip")
        return (values * scales[:, None]).astype(dtype)

    def packed(self, num_outputs: int) -> PackedWeight:
        """Return what the native kernels take."""
        return PackedWeight(self.values[...], num_outputs, self.scales[...].reshape(-1))


QUANTIZATIONS: dict[str, type[Int8Weight]] = {"int8": Int8Weight}
"""The formats that a checkpoint's weights can be brought to while they are loaded."""


def multiply(weight: StoredWeight, x: Array, num_outputs: int) -> Array:
    """Return the product of x `[num_rows, K]` and an unpacked weight, by XLA, in x's dtype."""
    if not isinstance(weight, nnx.Param):
        return weight.multiply(x, num_outputs).astype(x.dtype)
    # As one matrix: with its axes apart, XLA:CPU multiplies [9, 64, 576] by 8 rows three to
    # four times slower than [576, 576], for the same bytes.
    return jnp.einsum("TD,FD->TF", x, weight[...].reshape(num_outputs, -1))


def multiply_float32(weight: StoredWeight, x: Array, num_outputs: int) -> Array:
    """Return `multiply`'s product before it is rounded, float32."""
    if not isinstance(weight, nnx.Param):
        return weight.multiply(x, num_outputs)
    return jnp.einsum("TD,FD->TF", x, weight[...], preferred_element_type=jnp.float32)


def look_up(weight: StoredWeight, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
    """Return rows `[n, num_inputs]` of a weight, packed or not, as `dtype`.

    No row number may be beyond the last; the scheduler has checked them.
    """
    if not isinstance(weight, nnx.Param):
        return weight.rows(rows, num_inputs, dtype)
    return _rows(weight[...], rows, num_inputs)


def packed_weight(weight: StoredWeight, num_outputs: int) -> PackedWeight | None:
    """Return what the native kernels take, or None if the weight is not packed."""
    if not is_packed(values_of(weight)[...]):
        return None
    if not isinstance(weight, nnx.Param):
        return weight.packed(num_outputs)
    return PackedWeight(weight[...], num_outputs)


def values_of(weight: StoredWeight) -> nnx.Param[Array]:
    """Return the parameter that holds the weight's elements, and that is packed."""
    return weight if isinstance(weight, nnx.Param) else weight.values


def can_pack(weight: StoredWeight) -> bool:
    """Return whether the native kernels multiply a weight."""
    return isinstance(weight, nnx.Param) or weight.can_pack


def _rows(values: Array, rows: Array, num_inputs: int) -> Array:
    if is_packed(values):
        return packed_rows(values, rows, num_inputs=num_inputs)
    return jnp.take(values, rows, axis=0, mode="clip")
