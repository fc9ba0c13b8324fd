"""`CheckpointFormat`: how the weights of a quantised checkpoint are stored, layer by layer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paged.models.quantized.form import WeightForm

type Tensors = Mapping[str, np.ndarray]
"""The tensors of one layer by the last part of their names, such as "qweight"."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a layer must be.

    Attributes:
      shape: its shape; that of a single number may have any number of axes.
      dtypes: names of the NumPy types that it may have.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


FLOATS = ("float16", "bfloat16", "float32")
"""Types that scales are stored in."""


class LayerScheme(Protocol):
    """How one layer's weight is stored in a checkpoint, and in which form it is kept; hashable."""

    @property
    def form(self) -> WeightForm:
        """The form in memory."""

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """Return why no weight of this shape can be stored so, or None."""

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """Return the tensors of a layer, by the last part of their names."""

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return the parameters of the form, with outputs and inputs of one axis each.

        Raises:
          ValueError: if the values are none that the config promises.
        """


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The quantisation of a checkpoint; hashable, so it can be part of a `ModelConfig`.

    Attributes:
      method: as in the config and in `--quantization`: "awq", "gptq", "compressed-tensors", "fp8".
      schemes: regular expression for names of modules, and how those are stored; the first counts.
      ignored: regular expressions for modules that are not quantised.
      head: whether the head is a module like the others; else it is never quantised.
      ignored_tensors: regular expression for tensors that nothing needs.
    """

    method: str
    schemes: tuple[tuple[str, LayerScheme], ...]
    ignored: tuple[str, ...] = ()
    head: bool = False
    ignored_tensors: str | None = None

    def scheme(self, module: str) -> LayerScheme | None:
        """Return how the weight of a module is stored, None if it is not quantised.

        Args:
          module: its name in the checkpoint, such as "model.layers.0.mlp.up_proj".
        """
        if module == "lm_head" and not self.head:
            return None
        if any(re.match(pattern, module) for pattern in self.ignored):
            return None
        schemes = (scheme for pattern, scheme in self.schemes if re.match(pattern, module))
        return next(schemes, None)

    def ignores_tensor(self, name: str) -> bool:
        """Return whether nothing needs a tensor of this name."""
        return self.ignored_tensors is not None and bool(re.search(self.ignored_tensors, name))
