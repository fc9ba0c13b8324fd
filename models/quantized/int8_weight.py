"""`Int8Weight`: int8 and one float32 scale for each output."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.models.quantized.activations import round_to_int8
from paged.models.stored_weight import rows_of
from paged.native.linear import PackedWeight
from paged.widened_product import widened_product


@dataclass(frozen=True, slots=True)
class Int8Form:
    """A weight as int8 and one float32 scale for each output: `values * scales`.

    Symmetric: an output's largest weight becomes 127 or -127.

    Attributes:
      rounds_activations: products are of rows that are rounded to int8, too.
    """

    rounds_activations: bool = False

    def quantize(self, weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the values and the scales of a weight."""
        wide = weight.astype(jnp.float32)
        input_axes = tuple(range(num_output_axes, weight.ndim))
        scales = jnp.abs(wide).max(axis=input_axes, keepdims=True) / 127
        # An output without weights has the scale 0; anything is divided by 1 instead.
        values = jnp.round(wide / jnp.where(scales == 0, 1, scales))
        values = jnp.clip(values, -127, 127).astype(jnp.int8)
        return {"values": values, "scales": scales.reshape(weight.shape[:num_output_axes])}

    def axes(
        self, axes: tuple[str, ...], num_output_axes: int
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the names of the axes."""
        return {"values": axes, "scales": axes[:num_output_axes]}

    def split_problem(self, num_inputs: int, num_parts: int) -> str | None:
        """Return None: a scale is for all inputs of an output, whoever has them."""
        return None

    def build(
        self, parts: dict[str, nnx.Param[Array]], sum_axis: str | None = None
    ) -> "Int8Weight":
        """Return the module."""
        return Int8Weight(self, parts["values"], parts["scales"], sum_axis)


class Int8Weight(nnx.Module):
    """See `Int8Form`; `values` has the weight's axes, `scales` those of its outputs.

    `sum_axis` is the mesh axis over which the largest element of a row is looked for, if any.
    """

    def __init__(
        self,
        form: Int8Form,
        values: nnx.Param[Array],
        scales: nnx.Param[Array],
        sum_axis: str | None = None,
    ) -> None:
        self.form, self.values, self.scales = form, values, scales
        self.sum_axis = sum_axis

    @property
    def can_pack(self) -> bool:
        """Whether native kernels multiply it: they leave rows as they are."""
        return not self.form.rounds_activations

    def matrix(self) -> np.ndarray:
        """Return the values as a matrix."""
        values = np.asarray(self.values[...])
        return values.reshape(self.scales[...].size, -1)

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product of x, by XLA: int8 is exact in any type that x has."""
        row_scales = None
        if self.form.rounds_activations:
            x, row_scales = round_to_int8(x, self.sum_axis)
        values = self.values[...].reshape(num_outputs, -1)
        y = widened_product(x, [(values, 0)], lambda part: part)
        y = y * self.scales[...].reshape(1, -1)
        return y if row_scales is None else y * row_scales

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows of the weight."""
        values = rows_of(self.values[...], rows, num_inputs).astype(jnp.float32)
        scales = jnp.take(self.scales[...].reshape(-1), rows, mode="clip")
        return (values * scales[:, None]).astype(dtype)

    def packed(self, num_outputs: int) -> PackedWeight:
        """Return what the native kernels take."""
        return PackedWeight(self.values[...], num_outputs, self.scales[...].reshape(-1))
