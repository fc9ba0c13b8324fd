"""`Linear`, `Embed`, `RMSNorm`: layers whose parameters name their axes.

A parameter's axes ("embed", "q_heads", "mlp", ...) are metadata; which of them are split over
which devices is `ShardingRules`' business, so no layer knows about meshes. Weights keep the order
of the checkpoint, output axes first: nothing is transposed while loading, a device's slice of the
output is one contiguous range of the file, and XLA multiplies either order equally fast in 16 bit.

On a CPU a weight may be replaced by its packed form (`paged.models.linear_packing`), which has four
axes, as no other weight has; the layer then calls the native kernel instead of XLA's.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged.models.token_blocks import take_best
from paged.native.linear import is_packed, packed_linear, packed_rows

# Uniform with variance 1 / fan-in: much cheaper to draw than normal, as good for random models.
# Jitted so that it is traced once per shape, not once per layer.
_init_weight = jax.jit(
    nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", in_axis=-1, out_axis=0),
    static_argnums=(1, 2),
)


def parameter(value: Array, axes: tuple[str, ...]) -> nnx.Param[Array]:
    """Return a parameter whose metadata `out_sharding` holds one logical name per axis."""
    assert value.ndim == len(axes), (value.shape, axes)
    # Not eager: the names are logical, and an eager parameter would take them for mesh axes.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


class Linear(nnx.Module):
    """A product with one weight of any number of axes, and a bias over its output axes.

    Args:
      equation: einsum of the input and the weight, such as "TD,NHD->TNH"; the weight has the
        output's axes first, then the input's.
      axes: logical name and size of each axis of the weight, in the equation's order.
      bias_axes: those names that the bias has, or () for no bias.
      dtype: element type of the parameters.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        equation: str,
        axes: dict[str, int],
        *,
        bias_axes: tuple[str, ...] = (),
        dtype: str,
        rngs: nnx.Rngs,
    ) -> None:
        inputs, rest = equation.split(",")
        weight_axes, outputs = rest.split("->")
        # The weight's axes: those of the output, then those that are summed over.
        assert weight_axes == outputs[1:] + inputs[1:], equation
        self.output_shape = tuple(axes.values())[: len(outputs) - 1]
        weight = _init_weight(rngs.params(), tuple(axes.values()), jnp.dtype(dtype))
        self.weight = parameter(weight, tuple(axes))
        bias_shape = tuple(axes[name] for name in bias_axes)
        self.bias = parameter(jnp.zeros(bias_shape, dtype), bias_axes) if bias_axes else None

    def __call__(self, x: Float[Array, "num_tokens ..."]) -> Float[Array, "num_tokens ..."]:
        """Return the product in x's dtype; x and the weight must have the same."""
        weight = self.weight[...]
        rows = x.reshape(x.shape[0], -1)
        num_outputs = math.prod(self.output_shape)
        if is_packed(weight):
            bias = None if self.bias is None else self.bias[...].reshape(-1)
            y = packed_linear(rows, weight, bias, num_outputs=num_outputs)
            return y.reshape(x.shape[0], *self.output_shape)
        # As one matrix: with its axes apart, XLA:CPU multiplies [9, 64, 576] by 8 rows three to
        # four times slower than [576, 576], for the same bytes.
        y = jnp.einsum("TD,FD->TF", rows, weight.reshape(num_outputs, -1))
        y = y.reshape(x.shape[0], *self.output_shape)
        return y if self.bias is None else y + self.bias[...][None]


class Embed(nnx.Module):
    """A table of one vector per token: the input embedding, and the output head."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str, rngs: nnx.Rngs) -> None:
        table = _init_weight(rngs.params(), (vocab_size, hidden_size), jnp.dtype(dtype))
        self.weight = parameter(table, ("vocab", "embed"))
        self.output_shape = (vocab_size,)
        self.hidden_size = hidden_size

    def __call__(self, token_ids: Int[Array, "num_tokens"]) -> Float[Array, "num_tokens hidden"]:
        """Return the vectors of `token_ids`."""
        weight = self.weight[...]
        if is_packed(weight):
            return packed_rows(weight, token_ids, num_inputs=self.hidden_size)
        # Ids come from the scheduler, which has checked them; clamping costs nothing in a gather.
        return jnp.take(weight, token_ids, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab_size"]:
        """Return the float32 product of `hidden` with every token's vector."""
        weight = self.weight[...]
        if is_packed(weight):
            (vocab_size,) = self.output_shape
            return packed_linear(hidden, weight, num_outputs=vocab_size, out_dtype="float32")
        return jnp.einsum("TD,VD->TV", hidden, weight, preferred_element_type=jnp.float32)

    def best_tokens(self, hidden: Float[Array, "n hidden"]) -> Int[Array, "n"]:
        """Return the first token with the largest logit of each row, int32."""
        return take_best(self.logits(hidden))


class RMSNorm(nnx.Module):
    """Scale each row to root mean square 1, then by the weight; computed in float32.

    Source: arXiv:1910.07467.
    """

    def __init__(self, size: int, *, epsilon: float, dtype: str) -> None:
        self.epsilon = epsilon
        self.weight = parameter(jnp.ones((size,), dtype), ("embed",))

    def __call__(self, x: Float[Array, "num_tokens size"]) -> Float[Array, "num_tokens size"]:
        """Return the normalised rows in x's dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return (normed * self.weight[...].astype(jnp.float32)[None]).astype(x.dtype)
