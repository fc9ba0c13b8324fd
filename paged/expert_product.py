"""`expert_product`: groups of rows, each times a weight of its own."""

import importlib
from types import ModuleType

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from paged import backends

# Without "native", which would be tried, and logged, for each layer on a CPU.
_PREFERENCE = {"gpu": ("triton",)}


def expert_product(
    x: Float[Array, "num_rows num_inputs"],
    weights: Float[Array, "num_experts num_outputs num_inputs"],
    bias: Float[Array, "num_experts num_outputs"] | None,
    group_ends: Int32[Array, "num_experts"],
    *,
    backend: str = "auto",
) -> Float[Array, "num_rows num_outputs"]:
    """Return `x @ weights[expert].T + bias[expert]` of each expert's rows, in x's dtype.

    Rows of expert i end at `group_ends[i]` and begin where those of the expert before it end. Rows
    after the last group are undefined. Sums are float32.

    Args:
      x: `[num_rows, num_inputs]`, sorted by expert.
      weights: `[num_experts, num_outputs, num_inputs]`, of x's dtype.
      bias: `[num_experts, num_outputs]`, of any float type, or None.
      group_ends: int32 `[num_experts]`, none below the one before it or above `num_rows`.
      backend: "auto", or the name of an implementation as a promise. XLA's is the reference: on
        CPUs and GPUs it multiplies each row by all experts.

    Raises:
      ValueError: if the shapes do not fit together, or if `backend` is unknown.
      NotImplementedError: if `backend` cannot run here or lacks the types; the message gives the
        reason.

    Source: grouped products, MegaBlocks, arXiv:2211.15841.
    """
    _check(x, weights, bias, group_ends)
    if choose_backend(x, weights, backend) == "triton":
        products: Array = _triton().expert_product(x, weights, bias, group_ends)
        return products
    return _by_xla(x, weights, bias, group_ends)


def choose_backend(x: Array, weights: Array, requested: str = "auto") -> str:
    """Return the implementation that `expert_product` uses, "xla" or "triton"."""
    return backends.resolve_backend(
        requested,
        backends.current_platform(),
        unsupported=lambda name: _unsupported(name, x, weights),
        preference=_PREFERENCE,
    )


def _unsupported(name: str, x: Array, weights: Array) -> str | None:
    if name == "native":
        return "it multiplies packed weights of experts only"
    reason: str | None = _triton().unsupported(x, weights) if name == "triton" else None
    return reason


def _triton() -> ModuleType:
    """Return the Triton backend, which is imported only where it is considered."""
    return importlib.import_module("paged.triton.expert_product")


def _by_xla(x: Array, weights: Array, bias: Array | None, group_ends: Array) -> Array:
    sizes = jnp.diff(group_ends, prepend=jnp.zeros(1, jnp.int32))
    products = lax.ragged_dot(x, weights.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)
    if bias is not None:
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)
        experts = jnp.searchsorted(group_ends, rows, side="right")
        products += jnp.take(bias, experts, axis=0, mode="clip").astype(jnp.float32)
    return products.astype(x.dtype)


def _check(x: Array, weights: Array, bias: Array | None, group_ends: Array) -> None:
    num_experts, num_outputs, num_inputs = weights.shape
    if x.shape[1] != num_inputs:
        raise ValueError(f"x has {x.shape[1]} inputs and weights {num_inputs}; they must be equal.")
    if bias is not None and bias.shape != (num_experts, num_outputs):
        raise ValueError(
            f"bias has shape {bias.shape}; weights ask for ({num_experts}, {num_outputs})."
        )
    if group_ends.shape != (num_experts,):
        raise ValueError(f"group_ends has shape {group_ends.shape}; it must be ({num_experts},).")
