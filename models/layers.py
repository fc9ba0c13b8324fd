"""`Linear`, `Embed`, `RMSNorm`: layers whose parameters name their axes.

A parameter's axes ("embed", "q_heads", "mlp", ...) are metadata; which of them are split over
which devices is `ShardingRules`' business. A layer knows only whether what it computes is a part,
and over which mesh axis the parts are summed or gathered (`split_layers`). Weights keep the order
of the checkpoint, output axes first: nothing is transposed while loading, a device's slice of the
output is one contiguous range of the file, and XLA multiplies either order equally fast in 16 bit.

How a weight is stored (`paged.models.stored_weight`) is no layer's business either. If it is packed
for a CPU, `project`, `project_gated` and a `Linear` with a residual are one native call each, norm
and activation included; otherwise XLA composes them.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged.models.lora import LayerAdapters
from paged.models.parameters import parameter, random_weight
from paged.models.stored_weight import (
    StoredWeight,
    look_up,
    multiply,
    multiply_float32,
    packed_weight,
)
from paged.models.token_blocks import first_best, take_best
from paged.native.linear import PackedNorm, PackedWeight, packed_best, packed_linear

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""What a gate may go through, by name."""


class Linear(nnx.Module):
    """A product with one weight of any number of axes, and a bias over its output axes.

    Args:
      equation: einsum of the input and the weight, such as "TD,NHD->TNH"; the weight has the
        output's axes first, then the input's.
      axes: logical name and size of each axis of the weight, in the equation's order.
      bias_axes: those names that the bias has, or () for no bias.
      dtype: element type of the parameters.
      rngs: source of the initial values.

    Attributes:
      input_axes: names of the axes that are summed over.
      sum_axis: mesh axis whose devices have the other inputs; their products are summed. None: all
        inputs are here.
      adapters: what LoRA adapters add to the product, for one batch (`attach_adapters`); None:
        nothing.
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
        self.input_axes = tuple(axes)[len(self.output_shape) :]
        self.sum_axis: str | None = None
        self.adapters: LayerAdapters | None = None
        self.weight: StoredWeight = random_weight(axes, dtype=dtype, rngs=rngs)
        bias_shape = tuple(axes[name] for name in bias_axes)
        self.bias = parameter(jnp.zeros(bias_shape, dtype), bias_axes) if bias_axes else None

    def __call__(
        self,
        x: Float[Array, "num_tokens ..."],
        residual: Float[Array, "num_tokens ..."] | None = None,
        num_rows: Int[Array, "1"] | None = None,
        *,
        is_wide: bool = False,
    ) -> Float[Array, "num_tokens ..."]:
        """Return the product.

        Args:
          x: the input, of the dtype that products are computed in.
          residual: float32, what is added to the product; the sum is float32, too.
          num_rows: rows from it on, if it is given, are padding and hold garbage.
          is_wide: a product alone is float32, as its terms are summed; else it has x's dtype. What
            devices sum is rounded to that in any case, to be half the bytes.
        """
        is_wide = is_wide or residual is not None
        packed = self.packed()
        if packed is None:
            y = self._product(x, is_wide)
            return y if residual is None else residual + y
        rows = None if residual is None else _rows(residual)
        inputs, packed = _in_order(_rows(x), packed)
        dtype = jnp.float32 if is_wide else x.dtype
        (y,) = packed_linear(inputs, [packed], residual=rows, num_rows=num_rows, out_dtype=dtype)
        y = y.reshape(x.shape[0], *self.output_shape)
        return y if self.adapters is None else self.adapters.add(x, y)

    def packed(self) -> PackedWeight | None:
        """Return what the native kernels take, or None if the weight is not packed."""
        packed = packed_weight(self.weight, math.prod(self.output_shape))
        if packed is None or self.bias is None:
            return packed
        return packed._replace(bias=self.bias[...].reshape(-1))

    def _product(self, x: Array, is_wide: bool) -> Array:
        product = multiply_float32 if is_wide and self.sum_axis is None else multiply
        y = product(self.weight, _rows(x), math.prod(self.output_shape))
        y = y.reshape(x.shape[0], *self.output_shape)
        if self.adapters is not None:
            y = self.adapters.add(x, y)
        if self.sum_axis is not None:
            y = jax.lax.psum(y, self.sum_axis)  # type: ignore[no-untyped-call]
        y = y.astype(jnp.float32 if is_wide else x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)[None]


class Embed(nnx.Module):
    """A table of one vector per token: the input embedding, and the output head.

    Args:
      vocab_size, hidden_size: its shape.
      dtype: element type of the parameters.
      rngs: source of the initial values.
      multiplier: of the vectors that are looked up.
      logit_divisor: what logits are divided by; positive.
      logit_soft_cap: logits then become `cap * tanh(logits / cap)`; None: as they are.

    Attributes:
      vocab_axis: mesh axis whose devices have the vectors of the other tokens, in order; None: all
        are here.

    Source: vocabulary-parallel embedding, Megatron-LM, arXiv:1909.08053.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: str,
        rngs: nnx.Rngs,
        multiplier: float = 1.0,
        logit_divisor: float = 1.0,
        logit_soft_cap: float | None = None,
    ) -> None:
        axes = {"vocab": vocab_size, "embed": hidden_size}
        self.weight: StoredWeight = random_weight(axes, dtype=dtype, rngs=rngs)
        self.bias = None
        self.output_shape = (vocab_size,)
        self.hidden_size = hidden_size
        self.dtype = jnp.dtype(dtype)
        self.multiplier = multiplier
        self.logit_divisor = logit_divisor
        self.logit_soft_cap = logit_soft_cap
        self.vocab_axis: str | None = None

    def __call__(self, token_ids: Int[Array, "num_tokens"]) -> Float[Array, "num_tokens hidden"]:
        """Return the vectors of `token_ids`, which the scheduler has checked."""
        vectors = self._vectors(token_ids)
        # The multiplier is rounded to the type of the vectors, as it is where Gemma was trained.
        return vectors if self.multiplier == 1 else vectors * self.multiplier

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab_size"]:
        """Return the float32 logits of `hidden`, of all tokens."""
        logits = self._products(hidden)
        if self.logit_divisor != 1:
            logits = logits / self.logit_divisor
        if self.logit_soft_cap is not None:
            logits = jnp.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap
        if self.vocab_axis is None:
            return logits
        gathered: Array = jax.lax.all_gather(logits, self.vocab_axis, axis=1, tiled=True)
        return gathered

    def best_tokens(self, hidden: Float[Array, "n hidden"]) -> Int[Array, "n"]:
        """Return the first token with the largest logit of each row, int32.

        Products are compared: division by the divisor and the soft cap keep their order.
        """
        (vocab_size,) = self.output_shape
        packed = packed_weight(self.weight, vocab_size)
        if packed is not None:
            rows, packed = _in_order(hidden, packed)
            return packed_best(rows, packed)
        products = self._products(hidden)
        best = take_best(products)
        return best if self.vocab_axis is None else self._best_of_all(products, best)

    def _vectors(self, token_ids: Array) -> Array:
        if self.vocab_axis is None:
            return look_up(self.weight, token_ids, self.hidden_size, self.dtype)
        rows = token_ids - self._first_token()
        is_here = (rows >= 0) & (rows < self.output_shape[0])
        vectors = look_up(self.weight, jnp.where(is_here, rows, 0), self.hidden_size, self.dtype)
        found = jnp.where(is_here[:, None], vectors, 0)
        summed: Array = jax.lax.psum(found, self.vocab_axis)  # type: ignore[no-untyped-call]
        return summed

    def _products(self, hidden: Array) -> Array:
        """Return the float32 product of `hidden` with the vector of every token that is here."""
        (vocab_size,) = self.output_shape
        packed = packed_weight(self.weight, vocab_size)
        if packed is None:
            return multiply_float32(self.weight, hidden, vocab_size)
        rows, packed = _in_order(hidden, packed)
        (products,) = packed_linear(rows, [packed], out_dtype="float32")
        return products

    def _best_of_all(self, products: Array, best: Array) -> Array:
        """Return the best of each device's best tokens; one gather of two numbers per row."""
        product = jnp.take_along_axis(products, best[:, None], axis=1)[:, 0]
        bits = jax.lax.bitcast_convert_type(product, jnp.int32)
        pair = jnp.stack([bits, self._first_token() + best])
        pairs = jax.lax.all_gather(pair, self.vocab_axis)  # [num_devices, 2, n]
        # Devices are in order of their tokens, so the first of equals is the first token.
        device = first_best(jax.lax.bitcast_convert_type(pairs[:, 0], jnp.float32).T)
        return jnp.take_along_axis(pairs[:, 1], device[None], axis=0)[0]

    def _first_token(self) -> Array:
        return jax.lax.axis_index(self.vocab_axis) * self.output_shape[0]


class RMSNorm(nnx.Module):
    """Scale to root mean square 1, then by the weight; computed in float32.

    Args:
      axes: logical name and size of the axes, the last ones of the input, over which the mean is
        taken; the weight has them.
      epsilon: added to the mean square.
      dtype: element type of the weight.
      adds_one: 1 is added to the weight first, in float32.

    Attributes:
      mean_axis: mesh axis over which the mean is taken, too, as its devices have the other
        features; None: all are here.

    Source: arXiv:1910.07467.
    """

    def __init__(
        self, axes: dict[str, int], *, epsilon: float, dtype: str, adds_one: bool = False
    ) -> None:
        self.epsilon = epsilon
        self.adds_one = adds_one
        self.mean_axis: str | None = None
        initial = jnp.zeros if adds_one else jnp.ones
        self.weight = parameter(initial(tuple(axes.values()), dtype), tuple(axes))

    def __call__(
        self, x: Float[Array, "num_tokens ..."], *, is_wide: bool = False
    ) -> Float[Array, "num_tokens ..."]:
        """Return the normalised input in the weight's dtype, or, if it is wide, in float32."""
        scale = self.scale().astype(jnp.float32)
        wide = x.astype(jnp.float32)
        axes = tuple(range(-scale.ndim, 0))
        mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
        if self.mean_axis is not None:
            mean_square = jax.lax.pmean(mean_square, self.mean_axis)  # type: ignore[no-untyped-call]
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        scaled = normed * jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
        return scaled if is_wide else scaled.astype(self.weight.dtype)

    def scale(self) -> Array:
        """Return what is multiplied by: the weight, or 1 plus the weight in float32."""
        return 1 + self.weight[...].astype(jnp.float32) if self.adds_one else self.weight[...]


def project(
    x: Float[Array, "num_tokens size"],
    *layers: Linear,
    norm: RMSNorm | None = None,
    num_rows: Int[Array, "1"] | None = None,
) -> tuple[Float[Array, "num_tokens ..."], ...]:
    """Return the products of one input, or of what `norm` makes of it, with each layer.

    They have the dtype of the input, or of the norm's weight, which is what it is rounded to. Rows
    from `num_rows` on, if that is given, are padding and hold garbage.
    """
    packed = _all_packed(layers)
    if packed is None:
        rows = x if norm is None else norm(x)
        return tuple(layer(rows) for layer in layers)
    adapters = [layer.adapters for layer in layers]
    if norm is not None and any(adapters):
        x, norm = norm(x), None  # which the adapters read, too
    products = packed_linear(x, packed, norm=_packed_norm(norm), num_rows=num_rows)
    shapes = [(x.shape[0], *layer.output_shape) for layer in layers]
    outputs = [y.reshape(shape) for y, shape in zip(products, shapes, strict=True)]
    return tuple(
        y if adapter is None else adapter.add(x, y)
        for y, adapter in zip(outputs, adapters, strict=True)
    )


def project_gated(
    x: Float[Array, "num_tokens size"],
    gate: Linear,
    up: Linear,
    *,
    activation: str,
    norm: RMSNorm | None = None,
    num_rows: Int[Array, "1"] | None = None,
) -> Float[Array, "num_tokens ..."]:
    """Return `activation(gate(x)) * up(x)`, of what `norm` makes of x if there is one.

    Args:
      x: the input.
      gate, up: layers of equal output shapes.
      activation: a name in `ACTIVATIONS`.
      norm: applied to x first.
      num_rows: rows from it on are padding and hold garbage.

    Source: arXiv:2002.05202.
    """
    if gate.adapters is not None or up.adapters is not None:
        # Between product and activation, so the one native call that is both will not do.
        gated, y = project(x, gate, up, norm=norm, num_rows=num_rows)
        return ACTIVATIONS[activation](gated) * y
    packed = _all_packed((gate, up))
    if packed is None:
        rows = x if norm is None else norm(x)
        return ACTIVATIONS[activation](gate(rows)) * up(rows)
    (y,) = packed_linear(
        x, packed, norm=_packed_norm(norm), activation=activation, num_rows=num_rows
    )
    return y.reshape(x.shape[0], *gate.output_shape)


def _all_packed(layers: tuple[Linear, ...]) -> list[PackedWeight] | None:
    """Return what one native call takes, or None if the layers need calls of their own."""
    packed = [layer.packed() for layer in layers]
    known = [weight for weight in packed if weight is not None and weight.order is None]
    types = {weight.words.dtype for weight in known}
    return known if len(known) == len(packed) and len(types) == 1 else None


def _packed_norm(norm: RMSNorm | None) -> PackedNorm | None:
    return None if norm is None else PackedNorm(norm.scale(), norm.epsilon, norm.weight.dtype)


def _in_order(x: Array, packed: PackedWeight) -> tuple[Array, PackedWeight]:
    """Return rows with their inputs in a weight's order, and the weight to multiply them with."""
    if packed.order is None:
        return x, packed
    return jnp.take(x, packed.order, axis=1, mode="clip"), packed._replace(order=None)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)
