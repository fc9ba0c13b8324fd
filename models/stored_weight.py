"""How the weight of a linear layer is stored, and the only functions that look at that.

A weight `[N, K]`, N outputs, is a parameter of the model's own element type, or a `QuantizedWeight`
of another form (`paged.models.quantized`), a module with parameters of its own. It may be packed
for the native CPU kernels (`paged.models.linear_packing`); it has four axes then, as no other has.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

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

    def matrix(self) -> np.ndarray:
        """Return `values`, not packed yet, as a matrix in the order that `pack` is to have."""

    def multiply(self, x: Array, num_outputs: int) -> Array:
        """Return the float32 product `[num_rows, num_outputs]` of x `[num_rows, K]`, by XLA."""

    def rows(self, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
        """Return rows `[n, num_inputs]` of the weight."""

    def packed(self, num_outputs: int) -> PackedWeight:
        """Return what the native kernels take, once `values` are packed."""


type StoredWeight = nnx.Param[Array] | QuantizedWeight


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
    matrix = weight[...].reshape(num_outputs, -1)
    return jnp.einsum("TD,FD->TF", x, matrix, preferred_element_type=jnp.float32)


def look_up(weight: StoredWeight, rows: Array, num_inputs: int, dtype: np.dtype) -> Array:
    """Return rows `[n, num_inputs]` of a weight, packed or not, as `dtype`.

    No row number may be beyond the last; the scheduler has checked them.
    """
    if not isinstance(weight, nnx.Param):
        return weight.rows(rows, num_inputs, dtype)
    return rows_of(weight[...], rows, num_inputs)


def one_of_stack(weight: StoredWeight, index: Array) -> StoredWeight:
    """Return one of the weights that lie one beside the other in an unpacked stack."""
    one: StoredWeight = jax.tree.map(lambda stack: _one_of_array(stack, index), weight)
    return one


def _one_of_array(stack: Array, index: Array) -> Array:
    if stack.dtype != jnp.float8_e4m3fn:
        return stack[index]
    # As bytes: XLA:CPU slices no float8, and would widen the whole stack first.
    as_bytes = jax.lax.bitcast_convert_type(stack, jnp.uint8)
    return jax.lax.bitcast_convert_type(as_bytes[index], stack.dtype)


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


def matrix_to_pack(weight: StoredWeight, num_outputs: int) -> np.ndarray:
    """Return what `paged.native.linear.pack` takes of a weight that is not packed."""
    if not isinstance(weight, nnx.Param):
        return weight.matrix()
    return np.asarray(weight[...]).reshape(num_outputs, -1)


def rows_of(values: Array, rows: Array, num_inputs: int) -> Array:
    """Return rows of a matrix that is packed or not."""
    if is_packed(values):
        return packed_rows(values, rows, num_inputs=num_inputs)
    return jnp.take(values, rows, axis=0, mode="clip")
