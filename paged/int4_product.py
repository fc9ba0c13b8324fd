"""`int4_product`: rows times a weight of 4-bit integers with scales for groups of inputs."""

import importlib
from types import ModuleType

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

from paged import backends
from paged.widened_product import widened_product


def int4_product(
    x: Float[Array, "num_rows num_inputs"],
    values: UInt8[Array, "num_outputs half_inputs"],
    scales: Float[Array, "num_groups num_outputs"],
    zeros: UInt8[Array, "num_groups num_outputs"] | None = None,
    *,
    backend: str = "auto",
) -> Float[Array, "num_rows num_outputs"]:
    """Return the float32 product of x and the weight `(code - zero) * scale`.

    Each run of `num_inputs / num_groups` inputs shares a scale and a zero point per output, and
    fills half as many bytes: byte i holds the codes of its inputs i (low four bits) and
    `i + half`. So halves of a group are runs of bytes, and nothing need be interleaved.

    Args:
      x: `[num_rows, num_inputs]`; activations stay as they are.
      values: uint8 `[num_outputs, num_inputs / 2]`, two codes in 0 to 15 each.
      scales: `[num_groups, num_outputs]`, of any float type.
      zeros: uint8 `[num_groups, num_outputs]`, in 0 to 15; None: 8.
      backend: "auto": the platform's best implementation for these shapes and this number of rows;
        or the name of one as a promise.

    Raises:
      ValueError: if the shapes do not fit together, or if `backend` is unknown.
      TypeError: if `values` or `zeros` are not uint8.
      NotImplementedError: if `backend` cannot run here or lacks the shapes; the message gives the
        reason.

    Source: group-wise weights, arXiv:2210.17323 and arXiv:2306.00978.
    """
    _check(x, values, scales, zeros)
    name = backends.resolve_backend(
        backend,
        backends.current_platform(),
        unsupported=lambda name: _unsupported(name, x, scales),
    )
    if name == "triton":
        product: Array = _triton().int4_product(x, values, scales, zeros)
        return product
    return _by_xla(x, values, scales, zeros)


def _unsupported(name: str, x: Array, scales: Array) -> str | None:
    if name == "native":
        return "it has no product with 4-bit weights"
    reason: str | None = _triton().unsupported(x, scales) if name == "triton" else None
    return reason


def _triton() -> ModuleType:
    """Return the Triton backend, which is imported only where it is considered."""
    return importlib.import_module("paged.triton.int4_product")


def widen_int4(
    values: UInt8[Array, "num_outputs half_inputs"],
    scales: Float[Array, "num_groups num_outputs"],
    zeros: UInt8[Array, "num_groups num_outputs"] | None = None,
) -> Float[Array, "num_outputs num_inputs"]:
    """Return the float32 weight that `int4_product` multiplies by."""
    num_groups, num_outputs = scales.shape
    grouped = values.reshape(num_outputs, num_groups, -1)
    codes = jnp.concatenate([grouped & 15, grouped >> 4], axis=2)  # [num_outputs, num_groups, size]
    shift = 8.0 if zeros is None else zeros.T[..., None].astype(jnp.float32)
    weight = (codes.astype(jnp.float32) - shift) * scales.T[..., None].astype(jnp.float32)
    return weight.reshape(num_outputs, -1)


def _by_xla(x: Array, values: Array, scales: Array, zeros: Array | None) -> Array:
    parts = [(values, 0), (scales, 1)] + ([] if zeros is None else [(zeros, 1)])
    return widened_product(x, parts, widen_int4)


def _check(x: Array, values: Array, scales: Array, zeros: Array | None) -> None:
    for name, array in (("values", values), ("zeros", zeros)):
        if array is not None and array.dtype != jnp.uint8:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be uint8.")
    num_groups, num_outputs = scales.shape
    num_inputs = x.shape[1]
    if num_inputs % (2 * num_groups):
        raise ValueError(
            f"x has {num_inputs} inputs, which {num_groups} groups of scales cannot share in pairs."
        )
    if values.shape != (num_outputs, num_inputs // 2):
        raise ValueError(
            f"values has shape {values.shape}; x and scales ask for [num_outputs, num_inputs / 2] "
            f"= ({num_outputs}, {num_inputs // 2})."
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(
            f"zeros has shape {zeros.shape} and scales {scales.shape}; they must be equal."
        )
