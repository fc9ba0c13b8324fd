"""`widened_product`: rows times a weight that is stored in fewer bits, by XLA.

XLA:CPU writes the operand of a product to memory before it multiplies, so there the weight is
widened by blocks of outputs: what is widened stays in the cache, and no copy of the whole weight is
ever held. Accelerators widen inside the product, or one weight at a time (decision 0034).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from paged import backends

# Of float32 in a block: less than the second cache of a core, enough for a product.
_BLOCK_BYTES = 512 * 1024
_MIN_OUTPUTS = 64


def widened_product(
    x: Array,
    parts: Sequence[tuple[Array, int]],
    widen: Callable[..., Array],
) -> Array:
    """Return the float32 product `[num_rows, num_outputs]` of x and a weight.

    Args:
      x: `[num_rows, num_inputs]`.
      parts: arrays that make the weight, each with its axis of outputs.
      widen: returns the weight `[n, num_inputs]`, of any float type, of parts cut to n outputs. It
        is rounded to x's type, but on a CPU, which multiplies float32 in any case.
    """
    array, axis = parts[0]
    num_outputs, block = array.shape[axis], max(_MIN_OUTPUTS, _BLOCK_BYTES // (4 * x.shape[1] or 1))
    if backends.current_platform() != "cpu" or num_outputs <= block:
        return _product(x, widen(*(part for part, _ in parts)))

    def product_of(first: int | Array, size: int) -> Array:
        return _product(x, widen(*(_outputs_of(*part, first, size) for part in parts)))

    num_blocks, rest = divmod(num_outputs, block)
    starts = jnp.arange(num_blocks) * block
    blocks: Array = jax.lax.map(lambda first: product_of(first, block), starts)
    y = blocks.swapaxes(0, 1).reshape(x.shape[0], -1)
    if not rest:
        return y
    return jnp.concatenate([y, product_of(num_blocks * block, rest)], axis=1)


def _product(x: Array, weight: Array) -> Array:
    # XLA:CPU widens 16 bits before it multiplies them, and fails to where a gather gives x.
    dtype = jnp.float32 if backends.current_platform() == "cpu" else x.dtype
    x, weight = x.astype(dtype), weight.astype(dtype)
    return jnp.einsum("TD,FD->TF", x, weight, preferred_element_type=jnp.float32)


def _outputs_of(part: Array, axis: int, first: int | Array, size: int) -> Array:
    if part.dtype != jnp.float8_e4m3fn:
        return jax.lax.dynamic_slice_in_dim(part, first, size, axis)
    # As bytes, though that copies them: XLA:CPU slices no float8, and would widen all of it first.
    as_bytes = jax.lax.bitcast_convert_type(part, jnp.uint8)
    cut = jax.lax.dynamic_slice_in_dim(as_bytes, first, size, axis)
    return jax.lax.bitcast_convert_type(cut, part.dtype)
