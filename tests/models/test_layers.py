"""Packed layers, one native call each, equal what XLA composes from the same layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.models.layers import ACTIVATIONS, Embed, Linear, RMSNorm, project, project_gated
from paged.models.stored_weight import QUANTIZATIONS, values_of
from paged.native.linear import pack

pytestmark = pytest.mark.usefixtures("native")

# Of bfloat16, XLA rounds more often on the way.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
SIZE = 27
FORMATS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8")]


def linear(equation: str, axes: dict[str, int], dtype: str, quantization: str | None) -> Linear:
    outputs = equation.split("->T")[1]
    layer = Linear(
        equation, axes, bias_axes=tuple(axes)[: len(outputs)], dtype=dtype, rngs=nnx.Rngs(len(axes))
    )
    assert layer.bias is not None
    layer.bias.set_value(random(layer.bias.shape, dtype, seed=7))
    return quantized(layer, quantization)


def quantized[T: (Linear, Embed)](layer: T, quantization: str | None) -> T:
    if quantization is not None:
        layer.weight = QUANTIZATIONS[quantization](layer.weight, len(layer.output_shape))
    return layer


def pack_layer(layer: Linear | Embed) -> None:
    values = values_of(layer.weight)
    matrix = np.asarray(values[...]).reshape(np.prod(layer.output_shape), -1)
    values.set_value(jnp.asarray(pack(matrix)))


def random(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check(compute, layers, dtype: str) -> None:
    """Compare `compute()` before and after the layers are packed."""
    expected = jax.tree.map(np.asarray, compute())
    for layer in layers:
        pack_layer(layer)
    for y, wanted in zip(jax.tree.leaves(compute()), jax.tree.leaves(expected), strict=True):
        assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
        tolerance = TOLERANCE[dtype] if y.dtype == dtype else 1e-5
        np.testing.assert_allclose(
            np.asarray(y, np.float32),
            np.asarray(wanted, np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("has_norm", [True, False])
def test_projections_of_one_input(dtype, quantization, has_norm):
    q = linear("TD,NHD->TNH", {"n": 3, "h": 8, "d": SIZE}, dtype, quantization)
    k = linear("TD,KD->TK", {"k": 70, "d": SIZE}, dtype, quantization)
    norm = RMSNorm({"embed": SIZE}, epsilon=0.1, dtype=dtype)
    norm.weight.set_value(random((SIZE,), dtype, seed=1))
    x = random((5, SIZE), dtype, seed=2)
    check(lambda: project(x, q, k, norm=norm if has_norm else None), (q, k), dtype)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_projection(dtype, quantization, activation):
    gate = linear("TD,FD->TF", {"f": 70, "d": SIZE}, dtype, quantization)
    up = linear("TD,FD->TF", {"g": 70, "d": SIZE}, dtype, quantization)
    norm = RMSNorm({"embed": SIZE}, epsilon=0.1, dtype=dtype)
    x = random((5, SIZE), dtype, seed=2)
    check(
        lambda: (
            project_gated(x, gate, up, activation=activation, norm=norm),
            project_gated(x, up, gate, activation=activation),
        ),
        (gate, up),
        dtype,
    )


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_product_over_several_axes_with_a_residual(dtype, quantization):
    layer = linear("TNH,DNH->TD", {"d": 70, "n": 3, "h": 9}, dtype, quantization)
    x, residual = random((5, 3, 9), dtype, seed=1), random((5, 70), dtype, seed=2)
    check(lambda: (layer(x), layer(x, residual=residual)), [layer], dtype)


def test_padding_rows_take_no_part_in_packed_layers():
    gate = linear("TD,FD->TF", {"f": 70, "d": SIZE}, "float32", None)
    up = linear("TD,FD->TF", {"g": 70, "d": SIZE}, "float32", None)
    x, residual = random((5, SIZE), "float32", seed=1), random((5, 70), "float32", seed=2)
    num_rows = jnp.array([3], jnp.int32)

    def compute():
        rows = (
            *project(x, gate, up, num_rows=num_rows),
            project_gated(x, gate, up, activation="silu", num_rows=num_rows),
            up(x, residual, num_rows),
        )
        return [y[:3] for y in rows]

    check(compute, [gate, up], "float32")
    assert not up(x, residual, num_rows)[3:].any()


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_table_that_is_embedding_and_head(dtype, quantization):
    table = quantized(Embed(70, SIZE, dtype=dtype, rngs=nnx.Rngs(0)), quantization)
    ids, hidden = jnp.asarray([0, 69, 33]), random((5, SIZE), dtype, seed=2)
    check(lambda: (table(ids), table.logits(hidden)), [table], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_is_added_to_a_weight_in_float32(dtype):
    # As a bfloat16, 1 + 3 * 2**-9 is off by 2**-9; a product that is rounded once is not.
    weight = 3 * 2**-9
    norm = RMSNorm({"embed": SIZE}, epsilon=0.1, dtype=dtype, adds_one=True)
    norm.weight.set_value(jnp.full((SIZE,), weight, dtype))
    x = random((5, SIZE), dtype, seed=2)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.1) * (1 + weight)
    rtol = max(float(jnp.finfo(dtype).eps) / 2 * 1.01, 1e-6)
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), expected, rtol=rtol)
    # A product with the unit matrix shows what the kernel makes of it.
    unit = linear("TD,FD->TF", {"f": SIZE, "d": SIZE}, dtype, None)
    unit.bias = None
    unit.weight.set_value(jnp.eye(SIZE, dtype=dtype))
    pack_layer(unit)
    (y,) = project(x, unit, norm=norm)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=rtol)


def test_a_norm_over_several_axes_takes_one_mean():
    norm = RMSNorm({"heads": 3, "head_dim": 4}, epsilon=1e-6, dtype="float32")
    norm.weight.set_value(random((3, 4), "float32", seed=1))
    x = random((5, 3, 4), "float32", seed=2)
    flat = np.asarray(x, np.float64).reshape(5, 12)
    expected = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-6)
    expected = expected.reshape(5, 3, 4) * np.asarray(norm.weight[...], np.float64)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_logits_are_divided_then_capped_and_keep_their_order(is_packed):
    numbers = {"logit_divisor": 3.0, "logit_soft_cap": 2.0}
    table = Embed(70, SIZE, dtype="float32", rngs=nnx.Rngs(0), multiplier=5.0, **numbers)
    weight = np.asarray(table.weight[...], np.float64)
    hidden = random((5, SIZE), "float32", seed=2)
    if is_packed:
        pack_layer(table)
    products = np.asarray(hidden, np.float64) @ weight.T
    expected = 2 * np.tanh(products / 3 / 2)
    np.testing.assert_allclose(table.logits(hidden), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(table.best_tokens(hidden), expected.argmax(-1))
    np.testing.assert_allclose(table(jnp.asarray([7])), 5 * weight[7:8], rtol=1e-6)
