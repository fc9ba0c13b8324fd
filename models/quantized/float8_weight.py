"""`Float8Weight`: float8_e4m3fn and one float32 scale for each output."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.models.quantized.activations import FLOAT8, FLOAT8_MAX, round_to_float8
from paged.models.stored_weight import rows_of
from paged.native.linear import PackedWeight
from paged.widened_product import widened_product

ACTIVATIONS = (None, "static", "token")
"""How rows are rounded to e4m3 before a product: not at all, by the checkpoint's scale, each by its
own largest element."""


@dataclass(frozen=True, slots=True)
class Float8Form:
    """A weight as float8_e4m3fn and one float32 scale for each output: `values * scales`.

    Attributes:
      activations: one of `ACTIVATIONS`.
    """

    activations: str | None = None

    def quantize(self, weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the values and the scales of a weight, and a scale of 1 if x is to have one."""
        wide = weight.astype(jnp.float32)
        input_axes = tuple(range(num_output_axes, weight.ndim))
        scales = jnp.abs(wide).max(axis=input_axes, keepdims=True) / FLOAT8_MAX
        # An output without weights has the scale 0; anything is divided by 1 instead.
        values = wide / jnp.where(scales == 0, 1, scales)
        values = jnp.clip(values, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
        parts = {"values": values, "scales": scales.reshape(weight.shape[:num_output_axes])}
        if self.activations == "static":
            parts["input_scale"] = jnp.ones(1, jnp.float32)
        return parts

    def axes(
        self, axes: tuple[str, ...], num_output_axes: int
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the names of the axes."""
        return {"values": axes, "scales": axes[:num_output_axes], "input_scale": (None,)}

    def split_problem(self, num_inputs: int, num_parts: int) -> str | None:
        """Return None: a scale is for all inputs of an output, whoever has them."""
        return None

    def build(
        self, parts: dict[str, nnx.Param[Array]], sum_axis: str | None = None
    ) -> "Float8Weight":
        """Return the module."""
        input_scale = parts.get("input_scale")
        return Float8Weight(self, parts["values"], parts["scales"], input_scale, sum_axis)


class Float8Weight(nnx.Module):
    """See `Float8Form`; `values` has the weight's axes, `scales` those of its outputs.

    `input_scale` `[1]` is what rows are divided by before they are rounded, if that is static.
    `sum_axis` is the mesh axis over which the largest element of a row is looked for, if any.
    """

    def __init__(
        self,
        form: Float8Form,
        values: nnx.Param[Array],
        scales: nnx.Param[Array],
        input_scale: nnx.Param[Array] | None,
        sum_axis: str | None = None,
    ) -> None:
        self.form, self.values, self.scales = form, values, scales
        self.input_scale, self.sum_axis = input_scale, sum_axis

    @property
    def can_pack(self) -> bool:
        """Whether native kernels multiply it: they leave rows as they are."""
        return self.form.activations is None

    def matrix(self) -> np.ndarray:
        """Return the values as a matrix."""
        values = np.asarray(self.values[...])
        return values.reshape(self.scales[...].size, -1)

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product of x, by XLA: e4m3 is exact in any type that x has."""
        row_scales = None
        if self.form.activations is not None:
            static = None if self.input_scale is None else self.input_scale[...]
            x, row_scales = round_to_float8(x, static, self.sum_axis)
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
