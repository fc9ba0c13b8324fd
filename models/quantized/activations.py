"""Activations rounded to 8 bits before a product, as checkpoints with W8A8 schemes ask for.

A rounded row is what the checkpoint's authors measured their model with: exact in every type that
x may have, so the product is that of 8-bit numbers, whatever hardware multiplies them.
"""

import jax
import jax.numpy as jnp
from jax import Array

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
"""The largest float8_e4m3fn."""

INT8_MAX = 127.0
"""The largest int8."""

# Below it a row counts as zeros; as vLLM's kernels have it.
_LEAST_SCALE = 1 / (FLOAT8_MAX * 512)


def round_to_float8(
    x: Array, scale: Array | None, sum_axis: str | None = None
) -> tuple[Array, Array]:
    """Return e4m3 values of x, in x's type, and the float32 scales that they are to be times.

    Args:
      x: `[num_rows, num_inputs]`.
      scale: float32 `[1]`, of a calibrated checkpoint; None: each row's largest becomes 448.
      sum_axis: mesh axis whose devices have the rest of each row; None: it is all here.

    Returns:
      The values, and scales `[num_rows, 1]` or `[1, 1]`.

    Source: OCP 8-bit floating point (OFP8); vLLM's `scaled_fp8_quant`.
    """
    wide = x.astype(jnp.float32)
    if scale is None:
        scales = jnp.maximum(_row_maxima(wide, sum_axis) / FLOAT8_MAX, _LEAST_SCALE)
    else:
        scales = scale.reshape(1, 1)
    # Clipped first: what is too large becomes NaN in this type.
    values = jnp.clip(wide / scales, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
    return values.astype(x.dtype), scales


def round_groups_to_float8(x: Array, group_size: int) -> Array:
    """Return x with each run of `group_size` inputs rounded to e4m3 by its own largest element.

    The values are back at their own scale, in x's type: runs of a row have different scales, so
    none can be left to the product.

    Args:
      x: `[num_rows, num_inputs]`.
      group_size: divides `num_inputs`.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2; vLLM's `per_token_group_quant_fp8`.
    """
    groups = x.astype(jnp.float32).reshape(len(x), -1, group_size)
    scales = jnp.abs(groups).max(axis=2, keepdims=True) / FLOAT8_MAX
    values = (groups / jnp.where(scales == 0, 1, scales)).astype(FLOAT8)
    return (values.astype(jnp.float32) * scales).reshape(x.shape).astype(x.dtype)


def round_to_int8(x: Array, sum_axis: str | None = None) -> tuple[Array, Array]:
    """Return integers up to 127, in x's type, and the float32 scale of each row `[num_rows, 1]`.

    Args:
      x, sum_axis: as in `round_to_float8`.

    Source: vLLM's `scaled_int8_quant`, symmetric and dynamic.
    """
    wide = x.astype(jnp.float32)
    scales = _row_maxima(wide, sum_axis) / INT8_MAX
    values = jnp.round(wide / jnp.where(scales == 0, 1, scales))
    return values.astype(x.dtype), scales


def _row_maxima(x: Array, sum_axis: str | None) -> Array:
    maxima = jnp.abs(x).max(axis=1, keepdims=True)
    if sum_axis is not None:
        maxima = jax.lax.pmax(maxima, sum_axis)  # type: ignore[no-untyped-call]
    return maxima
