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

    def split_problem(self, num_inputs: int, num_parts: int) -> str | None:
        """Return why the inputs of a weight cannot be shared among devices, or None.

        Args:
          num_inputs: of the whole weight.
          num_parts: how many devices have an equal share of them, in order.
        """

    def build(
        self, parts: dict[str, nnx.Param[Array]], sum_axis: str | None = None
    ) -> QuantizedWeight:
        """Return the module that holds these parameters.

        Args:
          parts: see `quantize`.
          sum_axis: mesh axis whose devices have the other inputs of a row (`Linear.sum_axis`).
        """


def store(
    weight: nnx.Param[Array], form: WeightForm, num_output_axes: int, sum_axis: str | None = None
) -> QuantizedWeight:
    """Return a weight in another form.

    Args:
      weight: its axes are outputs first, then inputs.
      form: the form.
      num_output_axes: how many are outputs.
      sum_axis: see `WeightForm.build`.
    """
    axes = form.axes(weight.get_metadata("out_sharding"), num_output_axes)
    parts = form.quantize(weight[...], num_output_axes)
    named = {name: parameter(part, axes[name]) for name, part in parts.items()}
    return form.build(named, sum_axis)


def as_matrix(weight: Array, num_output_axes: int) -> Array:
    """Return a weight as `[num_outputs, num_inputs]`."""
    return weight.reshape(math.prod(weight.shape[:num_output_axes]), -1)
