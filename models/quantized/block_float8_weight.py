"""`BlockFloat8Weight`: float8_e4m3fn with a scale for each block of inputs of each output."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.models.quantized.activations import FLOAT8, FLOAT8_MAX, round_groups_to_float8
from paged.models.quantized.form import as_matrix
from paged.native.linear import PackedWeight
from paged.widened_product import widened_product

_CANNOT_PACK = "e4m3 weights with scales for blocks cannot be packed; check can_pack first."


@dataclass(frozen=True, slots=True)
class BlockFloat8Form:
    """A weight as float8_e4m3fn, with one float32 scale for a run of inputs of an output.

    Checkpoints have one scale for a rectangle of weights. It is kept for every output of the
    rectangle: a quarter of a bit a weight in runs of 128, for which outputs can be shared among
    devices anywhere, and parts of fused tensors are slices.

    Attributes:
      block_size: inputs that share a scale.
      rounds_activations: rows are rounded to e4m3, too, each run of inputs by its largest element.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
    """

    block_size: int
    rounds_activations: bool

    def quantize(self, weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the values and the scales of a weight."""
        matrix = as_matrix(weight, num_output_axes).astype(jnp.float32)
        grouped = matrix.reshape(len(matrix), -1, self.block_size)
        scales = jnp.abs(grouped).max(axis=2) / FLOAT8_MAX
        # Inputs without weights have the scale 0; anything is divided by 1 instead.
        values = grouped / jnp.where(scales == 0, 1, scales)[..., None]
        values = jnp.clip(values, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
        as_bytes = jax.lax.bitcast_convert_type(values.reshape(matrix.shape), jnp.uint8)
        return {"values": as_bytes, "scales": scales.T}

    def axes(
        self, axes: tuple[str, ...], num_output_axes: int
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the names of the axes: of several outputs or inputs the first, which is split."""
        outputs, inputs = axes[0], axes[num_output_axes]
        return {"values": (outputs, inputs), "scales": (inputs, outputs)}

    def split_problem(self, num_inputs: int, num_parts: int) -> str | None:
        """See `WeightForm.split_problem`."""
        share = num_inputs // num_parts
        if share % self.block_size:
            return f"the {share} inputs of one device are no blocks of {self.block_size}"
        return None

    def build(
        self, parts: dict[str, nnx.Param[Array]], sum_axis: str | None = None
    ) -> "BlockFloat8Weight":
        """Return the module; whoever has a block of a row has all of it."""
        return BlockFloat8Weight(self, parts["values"], parts["scales"])


class BlockFloat8Weight(nnx.Module):
    """See `BlockFloat8Form`.

    Attributes:
      values: the bytes of float8_e4m3fn, uint8 `[num_outputs, num_inputs]`: XLA:CPU slices no
        float8, and would copy all weights of a stack to take one.
      scales: float32 `[num_blocks, num_outputs]`.
    """

    can_pack: ClassVar[bool] = False

    def __init__(
        self, form: BlockFloat8Form, values: nnx.Param[Array], scales: nnx.Param[Array]
    ) -> None:
        self.form, self.values, self.scales = form, values, scales

    def matrix(self) -> np.ndarray:
        """Raise: the native kernels have no product with such weights."""
        raise NotImplementedError(_CANNOT_PACK)

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product of x, by XLA; in bfloat16, of scaled values that are rounded
        to it."""
        if self.form.rounds_activations:
            x = round_groups_to_float8(x, self.form.block_size)
        return widened_product(x, [(self.values[...], 0), (self.scales[...], 1)], _widen)

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows of the weight."""
        take = partial(jnp.take, indices=rows, mode="clip")
        return _widen(take(self.values[...], axis=0), take(self.scales[...], axis=1)).astype(dtype)

    def packed(self, num_outputs: int) -> PackedWeight:
        """Raise: the native kernels have no product with such weights."""
        raise NotImplementedError(_CANNOT_PACK)


def _widen(values: Array, scales: Array) -> Array:
    """Return the float32 weight `[num_outputs, num_inputs]`."""
    num_blocks, num_outputs = scales.shape
    floats = jax.lax.bitcast_convert_type(values, FLOAT8).astype(jnp.float32)
    grouped = floats.reshape(num_outputs, num_blocks, -1)
    return (grouped * scales.T[..., None]).reshape(num_outputs, -1)
