"""The native linear layer equals numpy in float64, at every instruction set of this CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.native import library
from paged.native.linear import PackedWeight, pack, packed_linear, packed_rows, packed_shape

# Accumulated in float32; the output's own rounding comes on top.
ROUNDING = {"bfloat16": 2**-8, "float32": 2**-22}
LEVELS = range(len(library.LEVELS))


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))


def run(x, weight, bias=None, *, out_dtype=None, level=-1) -> np.ndarray:
    packed = PackedWeight(pack(weight), len(weight), bias=bias)
    (y,) = packed_linear(x, [packed], out_dtype=out_dtype, level=level)
    assert y.dtype == (out_dtype or x.dtype)
    return np.asarray(y).astype(np.float64)


def check(x, weight, bias, y: np.ndarray, out_dtype: str) -> None:
    wide, other = x.astype(np.float64), weight.astype(np.float64)
    expected = wide @ other.T + (0 if bias is None else bias.astype(np.float64))
    # Of a sum of K products in float32 the error grows with the sum of their sizes.
    size = np.abs(wide) @ np.abs(other).T + 1
    allowed = ROUNDING[out_dtype] * np.abs(expected) + 2**-20 * size
    assert y.shape == expected.shape
    assert (np.abs(y - expected) <= allowed).all(), np.abs(y - expected).max()


@pytest.fixture(autouse=True, params=LEVELS, ids=library.LEVELS)
def level(native, request) -> int:
    """Each test runs once per instruction set that this CPU has."""
    if request.param > library.best_level():
        pytest.skip(f"this CPU lacks {library.LEVELS[request.param]}")
    return request.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_number_of_rows(level, dtype):
    rng = np.random.default_rng(0)
    weight = random(rng, (70, 33), dtype)
    for num_rows in range(1, 71):
        x = random(rng, (num_rows, 33), dtype)
        check(x, weight, None, run(x, weight, level=level), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_number_of_inputs_and_outputs(level, dtype, with_bias):
    rng = np.random.default_rng(1)
    for num_outputs in (1, 16, 17, 63, 64, 65, 129, 700):
        for num_inputs in (1, 2, 3, 7, 8, 64, 127):
            x = random(rng, (5, num_inputs), dtype)
            weight = random(rng, (num_outputs, num_inputs), dtype)
            bias = random(rng, (num_outputs,), dtype) if with_bias else None
            check(x, weight, bias, run(x, weight, bias, level=level), dtype)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 64])
def test_layer_of_a_real_size(level, num_rows):
    rng = np.random.default_rng(2)
    x, weight = random(rng, (num_rows, 576), "bfloat16"), random(rng, (1536, 576), "bfloat16")
    check(x, weight, None, run(x, weight, level=level), "bfloat16")


def test_float32_logits_of_bfloat16_are_not_rounded(level):
    rng = np.random.default_rng(3)
    x, weight = random(rng, (3, 65), "bfloat16"), random(rng, (130, 65), "bfloat16")
    check(x, weight, None, run(x, weight, out_dtype="float32", level=level), "float32")


def test_no_rows_and_no_inputs_are_no_special_case(level):
    empty = np.zeros((0, 8), np.float32)
    assert run(empty, np.ones((5, 8), np.float32), level=level).shape == (0, 5)
    nothing = run(np.zeros((2, 0), np.float32), np.zeros((5, 0), np.float32), level=level)
    np.testing.assert_array_equal(nothing, np.zeros((2, 5)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_spoils_its_own_row_only(level, bad):
    # An odd number of inputs: the last one's neighbour in memory belongs to the next row.
    x, weight = np.ones((3, 7), np.float32), np.ones((5, 7), np.float32)
    for dtype in ("float32", "bfloat16"):
        values = np.array(x)
        values[1, 0] = bad
        typed = np.asarray(jnp.asarray(values, dtype))
        y = run(typed, np.asarray(jnp.asarray(weight, dtype)), level=level)
        assert (y[[0, 2]] == 7).all()
        np.testing.assert_array_equal(y[1], np.full(5, bad))


def test_bfloat16_is_rounded_to_nearest_even(level):
    one_and_a_half_ulp = np.array([[1.0, 3 * 2**-8], [1.0, 2**-8]], np.float32)
    x = np.asarray(jnp.asarray(one_and_a_half_ulp, "bfloat16"))
    y = run(x, np.asarray(jnp.ones((1, 2), "bfloat16")), level=level)
    np.testing.assert_array_equal(y[:, 0], [1 + 2**-6, 1.0])


def test_rows_of_the_packed_weight_are_the_weight(level):
    del level
    for dtype in ("bfloat16", "float32"):
        weight = random(np.random.default_rng(4), (130, 33), dtype)
        ids = jnp.asarray([0, 129, 64, 63, 7])
        got = packed_rows(jnp.asarray(pack(weight)), ids, num_inputs=33)
        np.testing.assert_array_equal(got, weight[np.asarray(ids)])


def test_calls_side_by_side_do_not_wait_for_each_other_for_ever(level):
    # Many independent products in one program: XLA runs them as tasks of the pool they share.
    rng = np.random.default_rng(5)
    x = jnp.asarray(random(rng, (4, 64), "float32"))
    weights = [random(rng, (640, 64), "float32") for _ in range(32)]

    @jax.jit
    def products(x, packed):
        return [packed_linear(x, p, num_outputs=640, level=level) for p in packed]

    packed = [jnp.asarray(pack(weight)) for weight in weights]
    for _ in range(50):
        results = products(x, packed)
    for weight, y in zip(weights, results, strict=True):
        check(np.asarray(x), weight, None, np.asarray(y).astype(np.float64), "float32")


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        ("float32", "bfloat16", None, "must both be bfloat16 or float32"),
        ("float16", "float16", None, "must both be bfloat16 or float32"),
        ("float32", "float32", "bfloat16", "the bias must have"),
    ],
)
def test_types_without_a_kernel_are_refused(level, x, weight, bias, message):
    packed = jnp.zeros((1, 8, 64, 1), weight)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        packed_linear(
            jnp.zeros((2, 8), x),
            packed,
            None if bias is None else jnp.zeros(64, bias),
            num_outputs=64,
            level=level,
        ).block_until_ready()


@pytest.mark.parametrize(
    ("packed", "out_dtype", "message"),
    [
        ((1, 9, 64, 1), "float32", "do not fit"),
        ((2, 8, 64, 1), "float32", "do not fit"),
        ((1, 8, 64, 1), "bfloat16", "the type of x, or float32"),
        ((8, 64, 1), "float32", "the weight four"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(level, packed, out_dtype, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        packed_linear(
            jnp.zeros((2, 8)),
            jnp.zeros(packed),
            num_outputs=64,
            out_dtype=out_dtype,
            level=level,
        ).block_until_ready()


def test_an_instruction_set_that_the_cpu_lacks_is_refused(level):
    del level
    with pytest.raises(jax.errors.JaxRuntimeError, match="this CPU lacks that level"):
        packed_linear(
            jnp.zeros((2, 8)), jnp.zeros((1, 8, 64, 1)), num_outputs=64, level=99
        ).block_until_ready()


def test_a_type_that_cannot_be_packed_is_refused(level):
    del level
    with pytest.raises(ValueError, match="dtype=float16 has no native kernel; choose one of bf"):
        packed_shape(8, 8, np.dtype(np.float16))
