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

# Of widened weights in a block: less than the second cache of a core, enough for a product.
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
        is rounded to x's type, as x is not widened.
    """
    array, axis = parts[0]
    num_outputs, block = array.shape[axis], _outputs_of_block(x)

    def product(first: int | Array, size: int) -> Array:
        cut = [jax.lax.dynamic_slice_in_dim(part, first, size, axis) for part, axis in parts]
        weight = widen(*cut).astype(x.dtype)
        return jnp.einsum("TD,FD->TF", x, weight, preferred_element_type=jnp.float32)

    num_blocks, rest = divmod(num_outputs, block)
    if backends.current_platform() != "cpu" or num_blocks + bool(rest) < 2:
        weight = widen(*(part for part, _ in parts)).astype(x.dtype)
        return jnp.einsum("TD,FD->TF", x, weight, preferred_element_type=jnp.float32)
    starts = jnp.arange(num_blocks) * block
    blocks: Array = jax.lax.map(lambda first: product(first, block), starts)
    y = blocks.swapaxes(0, 1).reshape(x.shape[0], -1)
    if not rest:
        return y
    return jnp.concatenate([y, product(num_blocks * block, rest)], axis=1)


def _outputs_of_block(x: Array) -> int:
    return max(_MIN_OUTPUTS, _BLOCK_BYTES // max(1, x.shape[1] * x.dtype.itemsize))
