"""`GroupedWeight`: 4 or 8 bits, with a scale and a zero point for each group of inputs."""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.int4_product import int4_product, widen_int4
from paged.int8_product import int8_group_product, widen_int8
from paged.models.quantized.form import as_matrix
from paged.native.linear import PackedWeight, in_order_of_words


@dataclass(frozen=True, slots=True)
class GroupedForm:
    """A weight as unsigned codes, `(code - zero) * scale`, with scales for groups of inputs.

    Attributes:
      bits: 4 or 8.
      group_size: inputs that share a scale; None: all of them.
      has_zeros: groups have zero points; else they are the middle, 2 ** (bits - 1).
      is_permuted: groups are not of neighbours; inputs are put in order before the product.
    """

    bits: int
    group_size: int | None
    has_zeros: bool
    is_permuted: bool = False

    def quantize(self, weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the parameters of a weight, rounded to nearest."""
        matrix = as_matrix(weight, num_output_axes).astype(jnp.float32)
        num_outputs, num_inputs = matrix.shape
        grouped = matrix.reshape(num_outputs, -1, self.group_size or num_inputs)
        largest, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        if self.has_zeros:
            # Zero has a code of its own, so that padding stays zero.
            least = jnp.minimum(grouped.min(axis=2), 0)
            scales = (jnp.maximum(grouped.max(axis=2), 0) - least) / largest
            zeros = jnp.round(-least / jnp.where(scales == 0, 1, scales))
        else:
            scales = jnp.abs(grouped).max(axis=2) / (middle - 0.5)
            zeros = jnp.full_like(scales, middle)
        codes = jnp.round(grouped / jnp.where(scales == 0, 1, scales)[..., None]) + zeros[..., None]
        codes = jnp.clip(codes, 0, largest).astype(jnp.uint8)
        parts = {"values": self._join(codes), "scales": scales.T}
        if self.has_zeros:
            parts["zeros"] = zeros.astype(jnp.uint8).T
        if self.is_permuted:
            parts["order"] = jnp.arange(num_inputs, dtype=jnp.int32)
        return parts

    def stored(self, codes: np.ndarray) -> np.ndarray:
        """Return `values` for codes uint8 `[num_outputs, num_inputs]`, inputs in order."""
        num_outputs, num_inputs = codes.shape
        return self._join(codes.reshape(num_outputs, -1, self.group_size or num_inputs))

    def _join[T: (Array, np.ndarray)](self, codes: T) -> T:
        """Return codes `[num_outputs, num_groups, size]` as rows of bytes: see `int4_product`."""
        if self.bits == 4:
            half = codes.shape[2] // 2
            codes = codes[..., :half] | (codes[..., half:] << 4)
        return codes.reshape(codes.shape[0], -1)

    def axes(
        self, axes: tuple[str, ...], num_output_axes: int
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the names of the axes: of several outputs or inputs the first, which is split."""
        outputs, inputs = axes[0], axes[num_output_axes]
        groups = None if self.group_size is None else inputs  # one group: whoever has some inputs
        return {
            "values": (outputs, inputs),
            "scales": (groups, outputs),
            "zeros": (groups, outputs),
            "order": (None,),
        }

    def split_problem(self, num_inputs: int, num_parts: int) -> str | None:
        """See `WeightForm.split_problem`."""
        if self.is_permuted:
            return "its groups (act-order) have inputs from everywhere"
        share = num_inputs // num_parts
        if self.group_size is None:
            # Halves of a group share bytes: a part of them is no such weight.
            return "all inputs are one group" if self.bits == 4 else None
        if share % self.group_size:
            return f"the {share} inputs of one device are no groups of {self.group_size}"
        return None

    def build(
        self, parts: dict[str, nnx.Param[Array]], sum_axis: str | None = None
    ) -> "GroupedWeight":
        """Return the module; rows stay as they are, whoever has them."""
        return GroupedWeight(
            self, parts["values"], parts["scales"], parts.get("zeros"), parts.get("order")
        )


class GroupedWeight(nnx.Module):
    """See `GroupedForm`.

    Attributes:
      values: uint8 `[num_outputs, num_inputs * bits / 8]`.
      scales: float32 `[num_groups, num_outputs]`.
      zeros: uint8, the same; or None.
      order: int32 `[num_inputs]`, which input of x comes where; or None.
    """

    def __init__(
        self,
        form: GroupedForm,
        values: nnx.Param[Array],
        scales: nnx.Param[Array],
        zeros: nnx.Param[Array] | None,
        order: nnx.Param[Array] | None,
    ) -> None:
        self.form = form
        self.values, self.scales, self.zeros, self.order = values, scales, zeros, order

    @property
    def can_pack(self) -> bool:
        """Whether native kernels multiply it: 4 bits, in groups that fill words of 8."""
        return self.form.bits == 4 and self._group_size % 8 == 0

    @property
    def _group_size(self) -> int:
        codes = self.values[...].size * 8 // self.form.bits
        return codes // self.scales[...].size

    def matrix(self) -> np.ndarray:
        """Return the values in the order of the kernels' words; of a stack one after the other."""
        values = np.asarray(self.values[...])
        return in_order_of_words(values.reshape(-1, values.shape[-1]), self._group_size)

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product of x, by the best implementation for these shapes."""
        if self.order is not None:
            x = jnp.take(x, self.order[...], axis=1, mode="clip")
        product = int4_product if self.form.bits == 4 else int8_group_product
        zeros = None if self.zeros is None else self.zeros[...]
        return product(x, self.values[...], self.scales[...], zeros)

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows of the weight."""
        take = partial(jnp.take, indices=rows, mode="clip")
        zeros = None if self.zeros is None else take(self.zeros[...], axis=1)
        widen = widen_int4 if self.form.bits == 4 else widen_int8
        weight = widen(take(self.values[...], axis=0), take(self.scales[...], axis=1), zeros)
        if self.order is not None:
            weight = weight.at[:, self.order[...]].set(weight)
        return weight.astype(dtype)

    def packed(self, num_outputs: int) -> PackedWeight:
        """Return what the native kernels take."""
        zeros, order = (None if part is None else part[...] for part in (self.zeros, self.order))
        return PackedWeight(
            self.values[...], num_outputs, self.scales[...], zeros=zeros, order=order
        )


def group_problem(num_inputs: int, group_size: int | None) -> str | None:
    """Return why inputs cannot be cut into such groups, or None."""
    size = group_size or num_inputs
    if num_inputs % size or size % 2:
        return f"{num_inputs} inputs cannot be cut into even groups of {size}"
    return None
