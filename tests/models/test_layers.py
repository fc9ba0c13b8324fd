"""Packed layers, one native call each, equal what XLA composes from the same layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.models.layers import ACTIVATIONS, Embed, Linear, RMSNorm, project, project_gated
from paged.models.quantized.float8_weight import Float8Form
from paged.models.quantized.form import WeightForm, store
from paged.models.quantized.grouped_weight import GroupedForm
from paged.models.quantized.int8_weight import Int8Form
from paged.models.stored_weight import can_pack, matrix_to_pack, values_of
from paged.native.linear import pack

pytestmark = pytest.mark.usefixtures("native")

# Of bfloat16, XLA rounds more often on the way.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
SIZE = 27
FORMS: dict[str, WeightForm] = {"int8": Int8Form(), "float8": Float8Form()}
FORMATS = [(dtype, form) for dtype in ("float32", "bfloat16") for form in (None, *FORMS)]


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
        assert isinstance(layer.weight, nnx.Param)
        layer.weight = store(layer.weight, FORMS[quantization], len(layer.output_shape))
    return layer


def pack_layer(layer: Linear | Embed) -> None:
    values = values_of(layer.weight)
    assert can_pack(layer.weight)
    matrix = matrix_to_pack(layer.weight, int(np.prod(layer.output_shape)))
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
    x, residual = random((5, 3, 9), dtype, seed=1), random((5, 70), "float32", seed=2)
    check(lambda: (layer(x), layer(x, is_wide=True), layer(x, residual=residual)), [layer], dtype)


@pytest.mark.parametrize("is_packed", [False, True])
def test_neither_stream_nor_wide_product_is_rounded(is_packed):
    # Exact sums that bfloat16 has not enough digits for.
    layer = Linear("TD,FD->TF", {"f": 70, "d": 2}, dtype="bfloat16", rngs=nnx.Rngs(0))
    layer.weight.set_value(jnp.tile(jnp.asarray([1, 2.0**-9], "bfloat16"), (70, 1)))
    if is_packed:
        pack_layer(layer)
    x, residual = jnp.ones((5, 2), "bfloat16"), jnp.full((5, 70), 256 + 2.0**-9)
    assert (layer(x, is_wide=True) == 1 + 2.0**-9).all()
    assert (layer(x, residual=residual) == 257 + 2.0**-8).all()
    assert (layer(x) == jnp.ones((5, 70), "bfloat16")).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_takes_the_wide_stream_to_the_type_of_the_weights(dtype):
    layers = [linear("TD,FD->TF", {name: 70, "d": SIZE}, dtype, None) for name in "fg"]
    norm = RMSNorm({"embed": SIZE}, epsilon=0.1, dtype=dtype)
    norm.weight.set_value(random((SIZE,), dtype, seed=1))
    x = random((5, SIZE), "float32", seed=2)
    check(
        lambda: (
            project(x, *layers, norm=norm),
            project_gated(x, *layers, activation="silu", norm=norm),
        ),
        layers,
        dtype,
    )
    wide = norm(x, is_wide=True)
    assert (norm(x).dtype, wide.dtype) == (dtype, jnp.float32)
    np.testing.assert_array_equal(norm(x), wide.astype(dtype))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_weights_of_four_bits(dtype: str, has_zeros: bool):
    form = GroupedForm(bits=4, group_size=32, has_zeros=has_zeros)
    layers = []
    for name, rngs in (("n", 0), ("m", 1)):
        axes = {name: 70, "d": 64}
        layer = Linear("TD,FD->TF", axes, bias_axes=(name,), dtype=dtype, rngs=nnx.Rngs(rngs))
        layer.weight = store(layer.weight, form, 1)
        layers.append(layer)
    x, norm = random((5, 64), dtype, seed=1), RMSNorm({"d": 64}, epsilon=1e-6, dtype=dtype)
    check(
        lambda: (
            project(x, *layers, norm=norm),
            project_gated(x, *layers, activation="silu", norm=norm),
            layers[0](x, random((5, 70), "float32", seed=2)),
        ),
        layers,
        dtype,
    )


def test_inputs_are_put_in_order_before_a_packed_product():
    form = GroupedForm(bits=4, group_size=32, has_zeros=True, is_permuted=True)
    layers = []
    for seed in (0, 1):
        layer = Linear("TD,FD->TF", {"n": 70, "d": 64}, dtype="float32", rngs=nnx.Rngs(seed))
        layer.weight = store(layer.weight, form, 1)
        layer.weight.order.set_value(
            jnp.asarray(np.random.default_rng(seed).permutation(64), "int32")
        )
        layers.append(layer)
    x, norm = random((5, 64), "float32", seed=1), RMSNorm({"d": 64}, epsilon=1e-6, dtype="float32")
    check(
        lambda: (
            project(x, *layers, norm=norm),
            project_gated(x, *layers, activation="silu", norm=norm),
        ),
        layers,
        "float32",
    )


def test_layers_stored_in_different_types_share_an_input():
    plain, eight = (linear("TD,KD->TK", {"k": 70, "d": SIZE}, "float32", f) for f in (None, "int8"))
    x = random((5, SIZE), "float32", seed=1)
    norm = RMSNorm({"d": SIZE}, epsilon=1e-6, dtype="float32")
    check(lambda: project(x, plain, eight, norm=norm), (plain, eight), "float32")
