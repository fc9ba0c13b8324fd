"""The native linear layers equal numpy in float64, at every instruction set of this CPU."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.native import library
from paged.native.linear import (
    PackedNorm,
    PackedWeight,
    in_order_of_words,
    pack,
    packed_best,
    packed_linear,
    packed_rows,
    packed_shape,
)

# Accumulated in float32; the output's own rounding comes on top.
ROUNDING = {"bfloat16": 2**-8, "float32": 2**-22}
LEVELS = range(len(library.LEVELS))
# What a weight's type and x's type may be together.
TYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("float8_e4m3fn", "float32"),
    ("float8_e4m3fn", "bfloat16"),
]
SCALED = ("int8", "float8_e4m3fn")


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))


class Layer:
    """Random numbers for one linear layer, and what numpy makes of them."""

    def __init__(
        self, seed: int, shape: tuple[int, int], types: tuple[str, str], *, with_bias: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        num_outputs, _ = shape
        weight_type, dtype = types
        self.values = random(rng, shape, weight_type)
        self.scales = None
        if weight_type in SCALED:
            self.scales = rng.uniform(0.5, 1.5, num_outputs).astype(np.float32) / 100
        self.bias = random(rng, (num_outputs,), dtype) if with_bias else None
        self.packed = PackedWeight(pack(self.values), num_outputs, self.scales, self.bias)
        self.weight = self.values.astype(np.float64)
        if self.scales is not None:
            self.weight *= self.scales[:, None]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        bias = 0 if self.bias is None else self.bias.astype(np.float64)
        return x.astype(np.float64) @ self.weight.T + bias

    def size(self, x: np.ndarray) -> np.ndarray:
        """The sum of the sizes of the products, with which a float32 sum's error grows."""
        return np.abs(x.astype(np.float64)) @ np.abs(self.weight).T + 1


def run(calls, *args) -> list[np.ndarray]:
    """What a function of many native calls gives; one program, since compiling takes longest."""
    return [np.asarray(y).astype(np.float64) for y in jax.jit(calls)(*args)]


def check(y: np.ndarray, expected: np.ndarray, size: np.ndarray, dtype: str) -> None:
    allowed = ROUNDING[dtype] * np.abs(expected) + 2**-20 * size
    assert y.shape == expected.shape
    assert (np.abs(y - expected) <= allowed).all(), np.abs(y - expected).max()


@pytest.fixture(params=LEVELS, ids=library.LEVELS)
def level(native, request) -> int:
    """A test runs once per instruction set that this CPU has."""
    if request.param > library.best_level():
        pytest.skip(f"this CPU lacks {library.LEVELS[request.param]}")
    return request.param


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_any_number_of_rows(level, types):
    layer, rng = Layer(0, (70, 33), types), np.random.default_rng(1)
    inputs = [random(rng, (rows, 33), types[1]) for rows in (*range(1, 28), 70)]

    def calls(inputs, packed):
        return [packed_linear(x, [packed._replace(num_outputs=70)], level=level)[0] for x in inputs]

    for x, y in zip(inputs, run(calls, inputs, layer.packed), strict=True):
        check(y, layer(x), layer.size(x), types[1])


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_any_number_of_inputs_and_outputs(level, types):
    rng = np.random.default_rng(1)
    layers = [
        Layer(7, (num_outputs, num_inputs), types, with_bias=(num_outputs + num_inputs) % 2 == 0)
        for num_outputs in (1, 17, 63, 64, 65, 700)
        for num_inputs in (1, 2, 3, 4, 7, 8, 127)
    ]
    inputs = [random(rng, (5, layer.weight.shape[1]), types[1]) for layer in layers]
    many = [random(rng, (17, layer.weight.shape[1]), types[1]) for layer in layers]

    def calls():
        return [
            packed_linear(x, [layer.packed], level=level)[0]
            for x, layer in zip(inputs + many, layers * 2, strict=True)
        ]

    for x, layer, y in zip(inputs + many, layers * 2, run(calls), strict=True):
        check(y, layer(x), layer.size(x), types[1])


def test_layer_of_a_real_size(level):
    layer, rng = Layer(2, (1536, 576), ("bfloat16", "bfloat16")), np.random.default_rng(3)
    inputs = [random(rng, (rows, 576), "bfloat16") for rows in (1, 4, 64)]
    results = run(lambda: [packed_linear(x, [layer.packed], level=level)[0] for x in inputs])
    for x, y in zip(inputs, results, strict=True):
        check(y, layer(x), layer.size(x), "bfloat16")


def test_float32_logits_of_bfloat16_are_not_rounded(level):
    layer = Layer(3, (130, 65), ("bfloat16", "bfloat16"))
    x = random(np.random.default_rng(3), (3, 65), "bfloat16")
    (y,) = packed_linear(x, [layer.packed], out_dtype="float32", level=level)
    assert y.dtype == np.float32
    check(np.asarray(y).astype(np.float64), layer(x), layer.size(x), "float32")


def normalized(
    x: np.ndarray, weight: np.ndarray, epsilon: float, dtype: np.dtype | None = None
) -> np.ndarray:
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + epsilon) * weight.astype(np.float64)
    return np.asarray(jnp.asarray(y, jnp.float32).astype(dtype or x.dtype))


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize(("num_rows", "is_wide"), [(1, False), (7, True), (7, False), (300, True)])
def test_several_layers_of_one_normalised_input(level, types, num_rows, is_wide):
    """Which has the layers' type, or is rounded to it from float32."""
    num_inputs, dtype = 83, types[1]
    layers = [
        Layer(seed, (num_outputs, num_inputs), types, with_bias=seed != 1)
        for seed, num_outputs in enumerate((130, 64, 7))
    ]
    rng = np.random.default_rng(num_rows)
    # Small, so that epsilon shows.
    narrow = layers[0].packed.bias.dtype
    x = (random(rng, (num_rows, num_inputs), "float32") / 16).astype(
        np.float32 if is_wide else narrow
    )
    weight, epsilon = random(rng, (num_inputs,), dtype), 1e-2
    norm = PackedNorm(weight, epsilon, narrow if is_wide else None)
    outputs = packed_linear(x, [layer.packed for layer in layers], norm=norm, level=level)
    assert {y.dtype for y in outputs} == {narrow}
    normed = normalized(x, weight, epsilon, narrow)
    # An input on the edge between two bfloat16 may be rounded to the other one.
    edge = {"bfloat16": 2**-10, "float32": 2**-22}[dtype]
    for layer, y in zip(layers, outputs, strict=True):
        expected, size = layer(normed), layer.size(normed)
        allowed = ROUNDING[dtype] * np.abs(expected) + edge * size
        assert (np.abs(np.asarray(y).astype(np.float64) - expected) <= allowed).all()


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_is_activated_and_scales_the_other(level, types, activation):
    gate, up = (Layer(seed, (150, 31), types, with_bias=True) for seed in range(2))
    rng = np.random.default_rng(0)
    # Up to where e^x leaves float32.
    inputs = [random(rng, (rows, 31), types[1]) * size for rows, size in [(3, 1), (20, 40)]]
    inputs = [x.astype(gate.bias.dtype) for x in inputs]

    def calls():
        pair = [gate.packed, up.packed]
        return [packed_linear(x, pair, activation=activation, level=level)[0] for x in inputs]

    for x, y in zip(inputs, run(calls), strict=True):
        with np.errstate(over="ignore"):
            activated, value = ACTIVATIONS[activation](gate(x)), up(x)
        # |activation'| is at most 1.13; what it is off by is scaled by the other, and vice versa.
        size = 1.2 * gate.size(x) * np.abs(value) + up.size(x) * np.abs(activated)
        check(y, activated * value, size + np.abs(activated * value), types[1])


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_residual_is_added_before_rounding(level, types):
    layer, rng = Layer(0, (100, 40), types, with_bias=True), np.random.default_rng(0)
    x, residual = random(rng, (9, 40), types[1]), random(rng, (9, 100), types[1])
    (y,) = packed_linear(x, [layer.packed], residual=residual, level=level)
    expected = layer(x) + residual.astype(np.float64)
    check(np.asarray(y).astype(np.float64), expected, layer.size(x), types[1])

    wide = random(rng, (9, 100), "float32")
    (y,) = packed_linear(x, [layer.packed], residual=wide, out_dtype="float32", level=level)
    assert y.dtype == np.float32
    check(y, layer(x) + wide.astype(np.float64), layer.size(x), "float32")


def test_padding_rows_are_zero_and_not_read(level):
    types = ("bfloat16", "bfloat16")
    first, second = Layer(0, (100, 40), types), Layer(1, (70, 40), types, with_bias=True)
    rng = np.random.default_rng(0)
    residual = random(rng, (20, 100), types[1])
    norm_weight = random(rng, (40,), types[1])
    counts = (0, 1, 13, 20, 99)
    inputs = [random(rng, (20, 40), types[1]).copy() for _ in counts]
    for x, count in zip(inputs, counts, strict=True):
        x[count:] = np.nan
    gates = [first.packed, first.packed]

    def calls(counts):
        results = []
        for x, count in zip(inputs, counts, strict=True):
            norm, options = PackedNorm(norm_weight, 0.1), {"num_rows": count, "level": level}
            results += packed_linear(
                x, [first.packed, second.packed], norm=norm, residual=residual, **options
            )
            results += packed_linear(x, gates, activation="silu", out_dtype="float32", **options)
        return results

    results = iter(run(calls, [np.array([count], np.int32) for count in counts]))
    for x, count in zip(inputs, counts, strict=True):
        x = x[:count]
        normed = normalized(x, norm_weight, 0.1)
        product = first(x)
        gated = product * product / (1 + np.exp(-product))
        for expected, size in (
            (first(normed) + residual[:count].astype(np.float64), first.size(normed)),
            (second(normed), second.size(normed)),
            (gated, first.size(x) * (1 + 2 * np.abs(product))),
        ):
            y = next(results)
            # A normalised input may have been rounded the other way.
            np.testing.assert_allclose(
                y[:count], expected, rtol=2**-7, atol=2**-8 * size.max(initial=1)
            )
            assert not y[count:].any()


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_best_output_is_the_first_largest_logit(level, types):
    layer, rng = Layer(0, (333, 40), types), np.random.default_rng(0)
    inputs = [random(rng, (rows, 40), types[1]) for rows in (1, 6, 30, 130)]

    def calls():
        return [
            result
            for x in inputs
            for result in (
                packed_linear(x, [layer.packed], out_dtype="float32", level=level)[0],
                packed_best(x, layer.packed, level=level),
            )
        ]

    results = run(calls)
    for logits, best in zip(results[::2], results[1::2], strict=True):
        np.testing.assert_array_equal(best, logits.argmax(axis=1))


def best_of(weight: Sequence[float], x: float, level: int) -> int:
    matrix = np.asarray(weight, np.float32)[:, None]
    packed = PackedWeight(pack(matrix), len(weight))
    best = packed_best(np.array([[x]], np.float32), packed, level=level)
    assert best.dtype == np.int32
    return int(best[0])


def test_first_of_equal_outputs_is_the_best(level):
    for places in ([5, 6], [3, 70], [69, 130], [0, 129], [64, 65, 127]):
        weight = np.arange(140) % 7 / 10
        weight[places] = 1
        assert best_of(weight, 2, level) == places[0]
    assert best_of(np.ones(140), 1, level) == 0
    assert best_of(np.zeros(140), 1, level) == 0


def test_padding_is_no_output(level):
    # All are negative: zeros beyond the last would be larger.
    assert best_of(-1 - np.arange(70) % 69, 1, level) == 0
    assert best_of([-2.0, -1.0], 1, level) == 1
    assert best_of(np.full(65, -np.inf), 1, level) == 0


def test_best_of_a_row_with_a_nan_is_the_last(level):
    for place in (0, 3, 64, 139):
        weight = np.ones(140)
        weight[place] = np.nan
        assert best_of(weight, 1, level) == 139


def test_no_rows_and_no_inputs_are_no_special_case(level):
    for num_rows, num_inputs in ((0, 8), (2, 0)):
        packed = PackedWeight(pack(np.ones((5, num_inputs), np.float32)), 5)
        x = np.zeros((num_rows, num_inputs), np.float32)
        norm = PackedNorm(np.ones(num_inputs, np.float32), 1e-6)
        (y,) = packed_linear(x, [packed], norm=norm, level=level)
        np.testing.assert_array_equal(y, np.zeros((num_rows, 5)))
        best = packed_best(x, packed, level=level)
        np.testing.assert_array_equal(best, np.zeros(num_rows))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_spoils_its_own_row_only(level, bad):
    # An odd number of inputs: the last one's neighbour in memory belongs to the next row.
    values = np.ones((3, 7), np.float32)
    values[1, 0] = bad
    for weight_type, dtype in TYPES:
        weight = np.asarray(jnp.ones((5, 7), weight_type))
        scales = np.ones(5, np.float32) if weight_type in SCALED else None
        x = np.asarray(jnp.asarray(values, dtype))
        (y,) = packed_linear(x, [PackedWeight(pack(weight), 5, scales)], level=level)
        y = np.asarray(y).astype(np.float32)
        assert (y[[0, 2]] == 7).all()
        np.testing.assert_array_equal(y[1], np.full(5, bad))


def test_bfloat16_is_rounded_to_nearest_even(level):
    one_and_a_half_ulp = np.array([[1.0, 3 * 2**-8], [1.0, 2**-8]], np.float32)
    x = np.asarray(jnp.asarray(one_and_a_half_ulp, "bfloat16"))
    packed = PackedWeight(pack(np.asarray(jnp.ones((1, 2), "bfloat16"))), 1)
    (y,) = packed_linear(x, [packed], level=level)
    np.testing.assert_array_equal(np.asarray(y[:, 0], np.float32), [1 + 2**-6, 1.0])


@pytest.mark.parametrize("weight_type", SCALED)
def test_every_byte_is_multiplied_exactly(level, weight_type):
    values = np.arange(256, dtype=np.uint8).view(weight_type)
    packed = PackedWeight(pack(values[:, None]), 256, np.ones(256, np.float32))
    for dtype in ("bfloat16", "float32"):
        for num_rows in (1, 20):
            x = np.asarray(jnp.ones((num_rows, 1), dtype))
            (y,) = packed_linear(x, [packed], level=level)
            expected = np.broadcast_to(values.astype(np.float32), y.shape)
            np.testing.assert_array_equal(np.asarray(y, np.float32), expected)


def int4_layer(
    rng: np.random.Generator, num_outputs: int, num_inputs: int, group_size: int, has_zeros: bool
) -> tuple[PackedWeight, np.ndarray]:
    """A packed weight of 4-bit codes, and the float64 weight that they stand for."""
    num_groups, half = num_inputs // group_size, group_size // 2
    codes = rng.integers(0, 16, (num_outputs, num_inputs), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, (num_groups, num_outputs)).astype(np.float32)
    zeros = rng.integers(0, 16, scales.shape, dtype=np.uint8) if has_zeros else None
    values = np.zeros((num_outputs, num_inputs // 2), np.uint8)
    weight = np.zeros(codes.shape)
    for i in range(num_inputs):
        group, place = divmod(i, group_size)
        values[:, group * half + place % half] |= codes[:, i] << (4 if place >= half else 0)
        zero = 8.0 if zeros is None else zeros[group].astype(np.float64)
        weight[:, i] = (codes[:, i].astype(np.float64) - zero) * scales[group]
    words = pack(in_order_of_words(values, group_size))
    return PackedWeight(words, num_outputs, scales, zeros=zeros), weight


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_of_four_bits_are_scaled_by_groups(level, dtype, has_zeros):
    rng = np.random.default_rng(0)
    shapes = [(70, 96, 32), (130, 256, 128), (5, 24, 8), (64, 72, 72)]
    layers = [int4_layer(rng, *shape, has_zeros) for shape in shapes]
    inputs = [
        random(rng, (rows, weight.shape[1]), dtype) for _, weight in layers for rows in (1, 3, 40)
    ]

    def calls():
        return [
            packed_linear(inputs[3 * i + j], [packed], out_dtype="float32", level=level)[0]
            for i, (packed, _) in enumerate(layers)
            for j in range(3)
        ]

    for i, y in enumerate(run(calls)):
        weight, x = layers[i // 3][1], inputs[i].astype(np.float64)
        # Codes of at most 15 are multiplied, up to 143 with bfloat16, before zero points come off.
        size = np.abs(x).sum(axis=1, keepdims=True) * 0.1 * (143 if dtype == "bfloat16" else 15)
        assert (np.abs(y - x @ weight.T) <= 2**-20 * size + 1e-6).all()


def test_several_weights_of_four_bits_in_one_call(level):
    rng = np.random.default_rng(1)
    (gate, gate_weight), (up, up_weight) = (int4_layer(rng, 70, 64, 32, z) for z in (True, False))
    bias = random(rng, (70,), "float32")
    x = random(rng, (9, 64), "float32")
    gates, values = x @ gate_weight.T + bias, x @ up_weight.T
    first, second = packed_linear(x, [gate._replace(bias=bias), up], level=level)
    np.testing.assert_allclose(first, gates, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(second, values, rtol=1e-4, atol=1e-4)
    (y,) = packed_linear(x, [gate._replace(bias=bias), up], activation="silu", level=level)
    expected = gates / (1 + np.exp(-gates)) * values
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
    best = packed_best(x, gate, level=level)
    np.testing.assert_array_equal(best, (x @ gate_weight.T).argmax(axis=1))


def test_scales_that_make_no_groups_of_words_are_refused(native):
    packed, _ = int4_layer(np.random.default_rng(2), 5, 24, 8, True)
    x = np.ones((1, 24), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="scales of 4-bit weights must be float32"):
        packed_linear(x, [packed._replace(scales=np.ones((2, 5), np.float32), zeros=None)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_rows_of_the_packed_weight_are_the_weight(dtype):
    weight = random(np.random.default_rng(4), (130, 33), dtype)
    ids = np.random.default_rng(5).integers(0, 130, 40)
    ids[:4] = 0, 129, 64, 63
    got = packed_rows(jnp.asarray(pack(weight)), jnp.asarray(ids), num_inputs=33)
    np.testing.assert_array_equal(got, weight[ids])


def test_rows_that_do_not_exist_are_clamped():
    weight = random(np.random.default_rng(4), (128, 6), "float32")
    got = packed_rows(jnp.asarray(pack(weight)), jnp.asarray([-5, 128, 2**30]), num_inputs=6)
    np.testing.assert_array_equal(got, weight[[0, 127, 127]])


def test_longer_rows_than_the_weight_has_are_refused():
    packed = jnp.asarray(pack(random(np.random.default_rng(4), (64, 6), "bfloat16")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit the weight"):
        packed_rows(packed, jnp.asarray([0]), num_inputs=7).block_until_ready()


def test_calls_side_by_side_do_not_wait_for_each_other_for_ever(level):
    # Many independent products in one program: XLA runs them as tasks of the pool they share.
    layers = [Layer(seed, (640, 64), ("float32", "float32")) for seed in range(32)]
    x = random(np.random.default_rng(5), (4, 64), "float32")

    @jax.jit
    def products(x, words):
        packed = [PackedWeight(w, 640) for w in words]
        return [packed_linear(x, [weight], level=level)[0] for weight in packed]

    words = [jnp.asarray(layer.packed.words) for layer in layers]
    for _ in range(50):
        results = products(x, words)
    for layer, y in zip(layers, results, strict=True):
        check(np.asarray(y).astype(np.float64), layer(x), layer.size(x), "float32")


def refuse(message: str, x, *weights: PackedWeight, level: int = -1, **options) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(packed_linear(x, weights, level=level, **options))


@pytest.mark.usefixtures("native")
def test_types_without_a_kernel_are_refused():
    zeros, words = jnp.zeros((2, 8)), jnp.zeros((1, 8, 64, 1))
    half = PackedWeight(words.astype("float16"), 64)
    refuse("x must be bfloat16 or float32", zeros.astype("float16"), half)
    other = PackedWeight(jnp.zeros((1, 4, 64, 2), "bfloat16"), 64)
    refuse("must have the type of x, or int8", zeros, other)
    good = PackedWeight(words, 64)
    int8 = PackedWeight(jnp.zeros((1, 2, 64, 4), "int8"), 64, jnp.ones(64))
    refuse("must all have one type", zeros, good, int8)
    refuse("the scales has another type", zeros, int8._replace(scales=jnp.ones(64, "bfloat16")))
    refuse("the scales is missing", zeros, int8._replace(scales=None))
    refuse("a bias has another type", zeros, good._replace(bias=jnp.zeros(64, "bfloat16")))
    refuse("the type of x, or float32", zeros, good, out_dtype="bfloat16")


@pytest.mark.usefixtures("native")
def test_shapes_that_do_not_fit_are_refused():
    zeros, good = jnp.zeros((2, 8)), PackedWeight(jnp.zeros((1, 8, 64, 1)), 64)
    for shape in ((1, 9, 64, 1), (2, 8, 64, 1), (1, 8, 32, 1), (1, 8, 64, 2)):
        refuse("do not fit each other", zeros, PackedWeight(jnp.zeros(shape), 64))
    refuse("has four axes", zeros, PackedWeight(jnp.zeros((8, 64, 1)), 64))
    refuse("x must have two axes", jnp.zeros((2, 8, 1)), good)
    refuse("the residual has another", zeros, good, residual=jnp.zeros((2, 63)))
    refuse("num_rows has another", zeros, good, num_rows=jnp.zeros(2, "int32"))
    refuse("the norm's weight has another", zeros, good, norm=PackedNorm(jnp.zeros(7), 0.0))
    widened = PackedNorm(jnp.zeros(8, "bfloat16"), 0.0, "float32")
    refuse("its type or fewer bits", zeros.astype("bfloat16"), good, norm=widened)
    refuse("a bias has another", zeros, good._replace(bias=jnp.zeros(63)))
    refuse("nothing asks for", zeros, good._replace(scales=jnp.ones(64)))
    refuse("one to four weights", zeros, *[good] * 5)
    refuse("with an activation two", zeros, good, activation="silu")
    narrow = PackedWeight(jnp.zeros((1, 8, 64, 1)), 63)
    with pytest.raises(jax.errors.JaxRuntimeError, match="there is no output to choose"):
        packed_best(zeros, narrow._replace(num_outputs=0)).block_until_ready()


@pytest.mark.usefixtures("native")
def test_an_instruction_set_that_the_cpu_lacks_is_refused():
    zeros, words = jnp.zeros((2, 8)), jnp.zeros((1, 8, 64, 1))
    refuse("this CPU lacks that level", zeros, PackedWeight(words, 64), level=99)
    with pytest.raises(jax.errors.JaxRuntimeError, match="this CPU lacks that level"):
        packed_best(zeros, PackedWeight(words, 64), level=99).block_until_ready()


def test_a_type_that_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="dtype=float16 has no native kernel; choose one of bf"):
        packed_shape(8, 8, np.dtype(np.float16))
