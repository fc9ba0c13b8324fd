"""`MLP`, and `make_mlp`, which decides what a layer has after its attention."""

import dataclasses
from typing import Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Float, Int

from paged.models.branch import Branch
from paged.models.config import ModelConfig
from paged.models.layers import Linear, project_gated
from paged.models.moe import SparseMLP


@runtime_checkable
class FeedForward(Protocol):
    """What `make_mlp` returns: a module that works on each token by itself."""

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], branch: Branch, num_rows: Int[Array, "1"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the stream x after this branch; rows from `num_rows` on are padding."""


class MLP(nnx.Module):
    """A gated MLP: `down(activation(gate(x)) * up(x))`. Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, *, dtype: str, rngs: nnx.Rngs) -> None:
        mlp, embed = {"mlp": config.intermediate_size}, {"embed": config.hidden_size}

        def project(equation: str, out: dict[str, int], into: dict[str, int]) -> Linear:
            bias_axes = tuple(out) if config.mlp_bias else ()
            return Linear(equation, out | into, bias_axes=bias_axes, dtype=dtype, rngs=rngs)

        self.activation = config.activation
        self.gate_proj = project("TD,FD->TF", mlp, embed)
        self.up_proj = project("TD,FD->TF", mlp, embed)
        self.down_proj = project("TF,DF->TD", embed, mlp)

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], branch: Branch, num_rows: Int[Array, "1"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the stream x after this branch; rows from `num_rows` on are padding."""
        rows, norm = branch.enter(x)
        mixed = project_gated(
            rows,
            self.gate_proj,
            self.up_proj,
            activation=self.activation,
            norm=norm,
            num_rows=num_rows,
        )
        return branch.project_and_join(x, mixed, self.down_proj, num_rows)


def make_mlp(config: ModelConfig, layer: int, *, dtype: str, rngs: nnx.Rngs) -> FeedForward:
    """Return the MLP of a layer: what kind it is, the config says.

    Args:
      config: shape of the model.
      layer: its number.
      dtype: element type of the parameters.
      rngs: source of their initial values.
    """
    experts = config.experts
    if experts is None or layer in experts.dense_layers:
        return MLP(config, dtype=dtype, rngs=rngs)
    shared = None
    if experts.shared_size:
        # Experts that every token has are one MLP of all their features.
        shared_config = dataclasses.replace(config, intermediate_size=experts.shared_size)
        shared = MLP(shared_config, dtype=dtype, rngs=rngs)
    return SparseMLP(config.hidden_size, experts, dtype=dtype, rngs=rngs, shared=shared)
