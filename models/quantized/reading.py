"""The tensors of one quantised layer of a checkpoint: their names, and the parts made of them."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from paged.models.errors import CheckpointError
from paged.models.parameters import parameter
from paged.models.quantized.checkpoint_format import LayerScheme


def layer_tensors(
    scheme: LayerScheme, module: str, shape: tuple[int, int], num_experts: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a layer's tensors.

    Args:
      scheme: how its weight is stored.
      module: its name in the checkpoint.
      shape: its numbers of outputs and of inputs.
      num_experts: how many such layers are stacked; None: it is one.
    """
    stack = () if num_experts is None else (num_experts,)
    return {
        f"{module}.{part}": (*stack, *spec.shape) for part, spec in scheme.tensors(*shape).items()
    }


def same_shape(actual: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether shapes are equal.

    Those of a single number are, with any number of axes, and so are those of a stack of such.
    """
    return actual == expected or any(
        actual[:first] == expected[:first]
        and math.prod(actual[first:]) == 1 == math.prod(expected[first:])
        for first in (0, 1)
    )


def read_layer(
    scheme: LayerScheme,
    module: str,
    shape: tuple[int, int],
    read: Callable[[str], np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the parameters of a layer's weight, with one axis of outputs and one of inputs.

    Args:
      scheme, module, shape: as in `layer_tensors`.
      read: returns a tensor by its name.

    Raises:
      CheckpointError: if a tensor has another element type or holds what it cannot.
    """
    tensors = {}
    for part, spec in scheme.tensors(*shape).items():
        values = tensors[part] = read(f"{module}.{part}")
        if str(values.dtype) not in spec.dtypes:
            raise CheckpointError(
                f"tensor {module}.{part} has element type {values.dtype}; the checkpoint's "
                f"quantization_config asks for {' or '.join(spec.dtypes)}. Fetch the checkpoint "
                "again, or correct the config."
            )
    try:
        return scheme.convert(tensors)
    except ValueError as error:
        raise CheckpointError(
            f"{module}: {error}. Fetch the checkpoint again, or correct its quantization_config."
        ) from None


def widen_layer(
    scheme: LayerScheme,
    module: str,
    shape: tuple[int, int],
    read: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Return a layer's weight in full, float32 `[num_outputs, num_inputs]`; see `read_layer`."""
    num_outputs, num_inputs = shape
    parts = {
        name: parameter(jnp.asarray(part), (None,) * part.ndim)
        for name, part in read_layer(scheme, module, shape, read).items()
    }
    rows = jnp.arange(num_outputs, dtype=jnp.int32)
    return np.asarray(scheme.form.build(parts).rows(rows, num_inputs, np.dtype(np.float32)))
