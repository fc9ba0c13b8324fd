"""`quantize_weight`: a weight in full to the parts of a form, on the device, block by block."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from paged.backends import release_freed_memory
from paged.models.host_memory import to_device
from paged.models.quantized.form import WeightForm

# A weight is float32 for a while, twice its 16 bits and more: a large one, as a head is, would take
# more memory than the rest of a model in few bits.
BLOCK_BYTES = 32 << 20


def quantize_weight(
    form: WeightForm,
    num_output_axes: int,
    values: np.ndarray,
    dtype: np.dtype,
    shardings: Mapping[str, jax.sharding.Sharding],
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, jax.Array]:
    """Return the parts of a weight by name; what is made of an output depends on it alone.

    Args:
      form: what the weight is brought to.
      num_output_axes: how many of its axes, the first, are outputs.
      values: the weight.
      dtype: element type that it has, or is rounded to first.
      shardings: where each part lies. A weight on several devices is one block.
      block_bytes: of the values that are quantised at once.
    """
    quantize = _quantizer(form, num_output_axes, tuple(shardings.items()))
    is_split = any(len(place.device_set) > 1 for place in shardings.values())
    num_blocks = 1 if is_split else min(-(-values.nbytes // block_bytes), len(values))
    if num_blocks <= 1:
        return _of_block(quantize, values, dtype, shardings["values"])
    rows = -(-len(values) // num_blocks)
    blocks = [
        _of_block(quantize, values[start : start + rows], dtype, shardings["values"])
        for start in range(0, len(values), rows)
    ]
    names = ("outputs", *(f"other{i}" for i in range(1, values.ndim)))
    axes = form.axes(names, num_output_axes)
    joined = {}
    for name in tuple(blocks[0]):
        parts = [block.pop(name) for block in blocks]
        is_of_outputs = "outputs" in axes[name]
        joined[name] = (
            jnp.concatenate(parts, axis=axes[name].index("outputs")) if is_of_outputs else parts[0]
        )
    jax.block_until_ready(joined)  # type: ignore[no-untyped-call]
    release_freed_memory()
    return joined


def _of_block(
    quantize: Callable[[jax.Array], dict[str, jax.Array]],
    values: np.ndarray,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> dict[str, jax.Array]:
    array = to_device(values, dtype, sharding)
    parts = quantize(array)
    jax.block_until_ready(parts)  # type: ignore[no-untyped-call]
    array.delete()
    return parts


@functools.lru_cache
def _quantizer(
    form: WeightForm,
    num_output_axes: int,
    shardings: tuple[tuple[str, jax.sharding.Sharding], ...],
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Return the compiled function from a weight to its parts; kept, as weights share shapes."""
    quantize = functools.partial(form.quantize, num_output_axes=num_output_axes)
    return jax.jit(quantize, out_shardings=dict(shardings))
