"""`parameter`: a parameter whose axes have names; `random_weight`: what it holds at first."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

# Uniform with variance 1 / fan-in: much cheaper to draw than normal, as good for random models.
# Jitted so that it is traced once per shape, not once per layer.
_init_weight = jax.jit(
    nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", in_axis=-1, out_axis=0),
    static_argnums=(1, 2),
)


def parameter(value: Array, axes: tuple[str | None, ...]) -> nnx.Param[Array]:
    """Return a parameter whose metadata `out_sharding` holds one logical name per axis, or None."""
    assert value.ndim == len(axes), (value.shape, axes)
    # Not eager: the names are logical, and an eager parameter would take them for mesh axes.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def random_weight(axes: dict[str, int], *, dtype: str, rngs: nnx.Rngs) -> nnx.Param[Array]:
    """Return a random weight, of variance 1 / its last axis.

    Args:
      axes: logical name and size of each axis.
      dtype: element type.
      rngs: source of the values.
    """
    value = _init_weight(rngs.params(), tuple(axes.values()), jnp.dtype(dtype))
    return parameter(value, tuple(axes))
