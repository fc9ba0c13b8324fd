"""`int8_group_product`: rows times a weight of 8-bit codes with scales for groups of inputs."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

from paged.widened_product import widened_product


def int8_group_product(
    x: Float[Array, "num_rows num_inputs"],
    values: UInt8[Array, "num_outputs num_inputs"],
    scales: Float[Array, "num_groups num_outputs"],
    zeros: UInt8[Array, "num_groups num_outputs"] | None = None,
) -> Float[Array, "num_rows num_outputs"]:
    """Return the float32 product of x and the weight `(code - zero) * scale`, by XLA.

    Each run of `num_inputs / num_groups` inputs shares a scale and a zero point per output.

    Args:
      x: `[num_rows, num_inputs]`; activations stay as they are.
      values: uint8 `[num_outputs, num_inputs]`, codes in 0 to 255.
      scales: `[num_groups, num_outputs]`, of any float type.
      zeros: uint8 `[num_groups, num_outputs]`; None: 128.

    Raises:
      ValueError: if the shapes do not fit together.
    """
    num_groups, num_outputs = scales.shape
    num_inputs = x.shape[1]
    if values.shape != (num_outputs, num_inputs) or num_inputs % num_groups:
        raise ValueError(
            f"values has shape {values.shape}; x and scales ask for ({num_outputs}, {num_inputs}), "
            f"cut into {num_groups} equal groups of inputs."
        )
    parts = [(values, 0), (scales, 1)] + ([] if zeros is None else [(zeros, 1)])
    return widened_product(x, parts, widen_int8)


def widen_int8(
    values: UInt8[Array, "num_outputs num_inputs"],
    scales: Float[Array, "num_groups num_outputs"],
    zeros: UInt8[Array, "num_groups num_outputs"] | None = None,
) -> Float[Array, "num_outputs num_inputs"]:
    """Return the float32 weight that `int8_group_product` multiplies by."""
    num_groups, num_outputs = scales.shape
    codes = values.reshape(num_outputs, num_groups, -1).astype(jnp.float32)
    shift = 128.0 if zeros is None else zeros.T[..., None].astype(jnp.float32)
    return ((codes - shift) * scales.T[..., None].astype(jnp.float32)).reshape(num_outputs, -1)
