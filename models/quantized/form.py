"""`WeightForm`: in which parameters a quantised weight is kept; `store` puts one there."""

import math
from typing import Protocol

from flax import nnx
from jax import Array

from paged.models.parameters import parameter
from paged.models.stored_weight import QuantizedWeight


class WeightForm(Protocol):
    """How a weight is kept in fewer bits; equal where the parameters are alike."""

    def __hash__(self) -> int:
        """Return a hash: forms are static in compiled programs."""

    def quantize(self, weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the parameters of a weight of any float type, by name.

        Args:
          weight: its axes are outputs first, then inputs.
          num_output_axes: how many are outputs.
        """

    def axes(
        self, axes: tuple[str, ...], num_output_axes: int
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the logical names of the axes of each parameter, given those of the weight."""

    def build(self, parts: dict[str, nnx.Param[Array]]) -> QuantizedWeight:
        """Return the module that holds these parameters."""


def store(weight: nnx.Param[Array], form: WeightForm, num_output_axes: int) -> QuantizedWeight:
    """Return a weight in another form; `num_output_axes` of its axes, the first, are outputs."""
    axes = form.axes(weight.get_metadata("out_sharding"), num_output_axes)
    parts = form.quantize(weight[...], num_output_axes)
    return form.build({name: parameter(part, axes[name]) for name, part in parts.items()})


def as_matrix(weight: Array, num_output_axes: int) -> Array:
    """Return a weight as `[num_outputs, num_inputs]`."""
    return weight.reshape(math.prod(weight.shape[:num_output_axes]), -1)
