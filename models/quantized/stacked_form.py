"""`StackedForm`: weights of experts, one beside the other, each in a form of its own."""

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx
from jax import Array

from paged.models.quantized.form import WeightForm
from paged.models.stored_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class StackedForm:
    """A weight whose first axis is of experts: the slice of every part is one expert's part.

    Attributes:
      form: of one expert's weight.
    """

    form: WeightForm

    def quantize(self, weight: Array, num_output_axes: int) -> dict[str, Array]:
        """Return the parameters of all experts' weights; the axis of experts counts as outputs."""
        parts: dict[str, Array] = jax.vmap(
            partial(self.form.quantize, num_output_axes=num_output_axes - 1)
        )(weight)
        return parts

    def axes(
        self, axes: tuple[str, ...], num_output_axes: int
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the names of the axes."""
        of_one = self.form.axes(axes[1:], num_output_axes - 1)
        return {name: (axes[0], *names) for name, names in of_one.items()}

    def split_problem(self, num_inputs: int, num_parts: int) -> str | None:
        """See `WeightForm.split_problem`."""
        return self.form.split_problem(num_inputs, num_parts)

    def build(
        self, parts: dict[str, nnx.Param[Array]], sum_axis: str | None = None
    ) -> QuantizedWeight:
        """Return the module of all experts; whoever multiplies takes one expert's slice of it."""
        return self.form.build(parts, sum_axis)
