"""Linear layers of experts on packed weights: rows in groups, and a weight for each group."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from paged.native.linear import PackedWeight, pack, packed_shape

TARGET = "paged_expert_linear"
"""Name under which XLA knows the kernel."""

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""What a gate may go through."""


def packed_experts_shape(shape: tuple[int, int, int], dtype: np.dtype) -> tuple[int, ...]:
    """Return the packed shape of weights `[num_experts, num_outputs, num_inputs]`: five axes.

    Raises:
      ValueError: for an element type that the kernels do not have.
    """
    num_experts, num_outputs, num_inputs = shape
    return (num_experts, *packed_shape(num_outputs, num_inputs, dtype))


def pack_experts(weights: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return weights `[num_experts, num_outputs, num_inputs]` in the packed layout, one by one.

    Args:
      weights: the weights.
      out: where to put them, of the packed shape and their type; None takes new memory.

    Raises:
      ValueError: for an element type that the kernels do not have.
    """
    if out is None:
        num_experts, num_outputs, num_inputs = weights.shape
        shape = packed_experts_shape((num_experts, num_outputs, num_inputs), weights.dtype)
        out = np.empty(shape, weights.dtype)
    for weight, place in zip(weights, out, strict=True):
        pack(weight, place)
    return out


def are_packed_experts(weights: Array) -> bool:
    """Return whether weights of experts are in the packed layout: they alone have five axes."""
    return weights.ndim == 5


def packed_expert_linear(
    x: Array | np.ndarray,
    group_ends: Array | np.ndarray,
    weights: Sequence[PackedWeight],
    *,
    activation: str | None = None,
    gate_slope: float = 1.0,
    gate_limit: float = float("inf"),
    level: int = -1,
) -> Array:
    """Return `x @ weight.T + bias` of each group of rows with its expert's weight.

    Sums are float32, and the activation is computed in float32 before the result is rounded. Rows
    after the last group are zero and take no time; experts without rows are not read. Needs
    `load_library`.

    Args:
      x: `[num_rows, K]`, sorted by expert.
      group_ends: int32 `[num_experts]`, where each expert's rows end.
      weights: one, or two with an activation; words, scales, zero points and bias have a leading
        axis of experts.
      activation: one of `ACTIVATIONS`; the result is then `activation(y0) * y1` of two weights'
        products. "clamped_swiglu" is `g * sigmoid(gate_slope * g) * (v + 1)` of g, y0 clamped to
        at most `gate_limit`, and v, y1 clamped to at most that size.
      gate_slope, gate_limit: constants of "clamped_swiglu".
      level: index in `paged.native.library.LEVELS` of the instructions to use; -1: the best.
    """
    operands = [operand for weight in weights for operand in weight.operands()]
    zeros = sum((weight.zeros is not None) << i for i, weight in enumerate(weights))
    shape = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (x.shape[0], weights[0].num_outputs), x.dtype
    )
    y: Array = jax.ffi.ffi_call(TARGET, shape)(
        x,
        group_ends,
        *operands,
        zeros=np.int32(zeros),
        has_bias=weights[0].bias is not None,
        activation=np.int32(0 if activation is None else 1 + ACTIVATIONS.index(activation)),
        gate_slope=np.float32(gate_slope),
        gate_limit=np.float32(gate_limit),
        level=np.int32(level),
    )
    return y
