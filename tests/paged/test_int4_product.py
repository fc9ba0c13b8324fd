"""Products with 4-bit weights: XLA, and Triton in its interpreter, against float64 in NumPy."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.gpu.traits import Gpu
from paged.int4_product import int4_product

HAS_TRITON = importlib.util.find_spec("triton") is not None


def make_weight(
    num_outputs: int, num_inputs: int, group_size: int, has_zeros: bool, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Return values, scales and zeros, and the float64 weight that they stand for."""
    rng = np.random.default_rng(seed)
    num_groups = num_inputs // group_size
    codes = rng.integers(0, 16, (num_outputs, num_inputs), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.1, (num_groups, num_outputs)).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape, dtype=np.uint8) if has_zeros else None
    values = np.zeros((num_outputs, num_inputs // 2), np.uint8)
    weight = np.zeros(codes.shape)
    half = group_size // 2
    for i in range(num_inputs):
        group, place = divmod(i, group_size)
        values[:, group * half + place % half] |= codes[:, i] << (4 if place >= half else 0)
        zero = 8 if zeros is None else zeros[group].astype(np.float64)
        weight[:, i] = (codes[:, i].astype(np.float64) - zero) * scales[group]
    return values, scales, zeros, weight


def multiply(backend: str, x, values, scales, zeros) -> np.ndarray:
    if backend == "xla":
        return np.asarray(int4_product(x, values, scales, zeros, backend="xla"))
    if not HAS_TRITON:
        pytest.skip("missing tool: triton, of the extra `test`")
    from paged.gpu.interpreter import interpret
    from paged.triton.int4_product import int4_product_with

    gpu = Gpu(compute_capability=80, num_multiprocessors=4)
    return np.asarray(int4_product_with(interpret, gpu, x, values, scales, zeros))


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "group_size"),
    [
        (1, 64, 256, 128),  # groups cut among two programs
        (5, 100, 96, 32),  # neither rows nor outputs fill a tile
        (70, 130, 128, 64),  # two tiles of rows
    ],
)
def test_product_equals_that_with_the_widened_weight(
    backend: str, has_zeros: bool, num_rows: int, num_outputs: int, num_inputs: int, group_size: int
):
    values, scales, zeros, weight = make_weight(num_outputs, num_inputs, group_size, has_zeros, 1)
    x = np.random.default_rng(2).standard_normal((num_rows, num_inputs)).astype(np.float16)
    product = multiply(backend, x, values, scales, zeros)
    assert product.dtype == np.float32
    # XLA rounds the scaled weight to float16; the kernel rounds nothing but sums of float32.
    unit = 2.0**-11 if backend == "xla" else 2.0**-20
    size = np.abs(x.astype(np.float64)) @ np.abs(weight).T
    expected = x.astype(np.float64) @ weight.T
    assert (np.abs(product - expected) <= unit * size + 1e-6).all()


X = jax.ShapeDtypeStruct((5, 128), jnp.float32)
VALUES = jax.ShapeDtypeStruct((6, 64), jnp.uint8)
SCALES = jax.ShapeDtypeStruct((4, 6), jnp.float32)
ZEROS = jax.ShapeDtypeStruct((4, 6), jnp.uint8)


@pytest.mark.parametrize(
    ("values", "scales", "zeros", "error", "message"),
    [
        (jax.ShapeDtypeStruct((6, 64), jnp.int8), SCALES, None, TypeError, "values has dtype int8"),
        (VALUES, SCALES, SCALES, TypeError, "zeros has dtype float32; it must be uint8"),
        (jax.ShapeDtypeStruct((6, 63), jnp.uint8), SCALES, ZEROS, ValueError, "values has shape"),
        (VALUES, SCALES, jax.ShapeDtypeStruct((6, 4), jnp.uint8), ValueError, "zeros has shape"),
        (VALUES, jax.ShapeDtypeStruct((3, 6), jnp.float32), None, ValueError, "which 3 groups"),
    ],
)
def test_wrong_array_is_named(values, scales, zeros, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        jax.eval_shape(int4_product, X, values, scales, zeros)


def test_backend_without_such_a_product_is_refused(native):
    with pytest.raises(NotImplementedError, match="it has no product with 4-bit weights"):
        jax.eval_shape(lambda *a: int4_product(*a, backend="native"), X, VALUES, SCALES)


@pytest.mark.parametrize(
    ("x", "num_groups", "message"),
    [
        (X, 1, "x is float32, neither bfloat16 nor float16"),
        (jax.ShapeDtypeStruct((5, 96), jnp.float16), 2, "groups of 48 inputs are none of 32, 64"),
        (jax.ShapeDtypeStruct((257, 128), jnp.float16), 1, "257 rows are more than 256"),
        (jax.ShapeDtypeStruct((256, 128), jnp.bfloat16), 1, None),
    ],
)
def test_triton_says_what_it_does_not_multiply(x, num_groups: int, message: str | None):
    if not HAS_TRITON:
        pytest.skip("missing tool: triton, of the extra `test`")
    from paged.triton.int4_product import unsupported

    reason = unsupported(x, jax.ShapeDtypeStruct((num_groups, 6), jnp.float32))
    assert (reason or "").startswith(message or "")
    assert (reason is None) == (message is None)
