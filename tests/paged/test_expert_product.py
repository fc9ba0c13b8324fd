"""Products of groups of rows: XLA, and Triton in its interpreter, against float64 in NumPy."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.expert_product import expert_product

HAS_TRITON = importlib.util.find_spec("triton") is not None
NUM_ROWS = 70


def multiply(backend: str, x, weights, bias, ends) -> np.ndarray:
    if backend == "xla":
        return np.asarray(expert_product(x, weights, bias, ends, backend="xla"))
    if not HAS_TRITON:
        pytest.skip("missing tool: triton, of the extra `test`")
    from paged.gpu.interpreter import interpret
    from paged.triton.expert_product import expert_product_with

    return np.asarray(expert_product_with(interpret, x, weights, bias, ends))


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [[1, 0, 40, 20], [0, 0, 0, 70], [0, 0, 0, 0], [33, 1, 17, 19]])
def test_each_group_is_multiplied_by_its_experts_weight(backend: str, has_bias: bool, sizes):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_ROWS, 96)).astype(np.float16)
    # Neither outputs nor inputs fill a tile.
    weights = rng.standard_normal((4, 70, 96)).astype(np.float16)
    bias = rng.standard_normal((4, 70)).astype(np.float16) if has_bias else None
    ends = jnp.cumsum(jnp.array(sizes, jnp.int32))
    y = multiply(backend, jnp.asarray(x), weights, bias, ends)
    assert (y.shape, y.dtype) == ((NUM_ROWS, 70), np.float16)
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        wide = x[rows].astype(np.float64)
        expected = wide @ weights[i].T.astype(np.float64) + (0 if bias is None else bias[i])
        # Rounded once, to float16, of float32 sums.
        np.testing.assert_allclose(y[rows].astype(np.float64), expected, rtol=2**-10, atol=2e-4)
        start += size


X = jax.ShapeDtypeStruct((5, 8), jnp.float32)
WEIGHTS = jax.ShapeDtypeStruct((3, 6, 8), jnp.float32)
BIAS = jax.ShapeDtypeStruct((3, 6), jnp.float32)
ENDS = jax.ShapeDtypeStruct((3,), jnp.int32)


@pytest.mark.parametrize(
    ("x", "bias", "ends", "message"),
    [
        (jax.ShapeDtypeStruct((5, 7), jnp.float32), BIAS, ENDS, "x has 7 inputs and weights 8"),
        (X, jax.ShapeDtypeStruct((3, 5), jnp.float32), ENDS, "bias has shape"),
        (X, BIAS, jax.ShapeDtypeStruct((4,), jnp.int32), "group_ends has shape"),
    ],
)
def test_wrong_shape_is_named(x, bias, ends, message: str):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(expert_product, x, WEIGHTS, bias, ends)


def test_backend_without_such_a_product_is_refused(native):
    with pytest.raises(NotImplementedError, match="it multiplies packed weights of experts only"):
        jax.eval_shape(lambda *a: expert_product(*a, backend="native"), X, WEIGHTS, BIAS, ENDS)


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "message"),
    [
        ("float32", "float32", "x is float32, neither bfloat16 nor float16"),
        ("float16", "bfloat16", "the weights are bfloat16, x is float16"),
        ("bfloat16", "bfloat16", None),
    ],
)
def test_triton_says_what_it_does_not_multiply(x_dtype: str, dtype: str, message: str | None):
    if not HAS_TRITON:
        pytest.skip("missing tool: triton, of the extra `test`")
    from paged.triton.expert_product import unsupported

    x, weights = jax.ShapeDtypeStruct((5, 8), x_dtype), jax.ShapeDtypeStruct((3, 6, 8), dtype)
    assert unsupported(x, weights) == message
