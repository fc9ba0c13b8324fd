"""Products with narrow weights by XLA: the same by blocks, and no widened weight in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.int4_product import int4_product
from paged.int8_product import int8_group_product
from paged.widened_product import widened_product


@pytest.mark.parametrize("num_outputs", [3, 1024, 2048, 2500])
def test_outputs_of_all_blocks_are_there_in_order(num_outputs: int):
    rng = np.random.default_rng(0)
    # 512 outputs of 256 float32 inputs are a block.
    values = rng.integers(-128, 128, (num_outputs, 256), np.int8)
    scales = rng.uniform(0.5, 1, (1, num_outputs)).astype(np.float32)
    x = rng.integers(-8, 8, (5, 256)).astype(np.float32)

    def widen(part, scale):
        return part.astype(jnp.float32) * scale.T

    product = jax.jit(lambda *a: widened_product(a[0], [(a[1], 0), (a[2], 1)], widen))
    expected = x.astype(np.float64) @ (values * scales.T.astype(np.float64)).T
    np.testing.assert_allclose(product(x, values, scales), expected, rtol=1e-5, atol=1e-2)


SIZE = 4096  # outputs and inputs; the widened weight is 32 MiB in bfloat16
X = jax.ShapeDtypeStruct((8, SIZE), jnp.bfloat16)
SCALES = jax.ShapeDtypeStruct((SIZE // 128, SIZE), jnp.float32)
ZEROS = jax.ShapeDtypeStruct((SIZE // 128, SIZE), jnp.uint8)


def bytes_of(shape: tuple[int, ...], dtype: str):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("product", "arguments"),
    [
        (
            lambda *a: int4_product(*a, backend="xla"),
            (X, bytes_of((SIZE, SIZE // 2), "uint8"), SCALES, ZEROS),
        ),
        (int8_group_product, (X, bytes_of((SIZE, SIZE), "uint8"), SCALES, ZEROS)),
        (
            lambda x, values: widened_product(x, [(values, 0)], lambda part: part),
            (X, bytes_of((SIZE, SIZE), "int8")),
        ),
        (
            lambda x, values: widened_product(x, [(values, 0)], lambda part: part),
            (X, bytes_of((SIZE, SIZE), "float8_e4m3fn")),
        ),
    ],
    ids=["int4", "int8_group", "int8", "float8"],
)
def test_no_copy_of_the_widened_weight_is_held(product, arguments):
    compiled = jax.jit(product).lower(*arguments).compile()
    # A block and what it is made of, widened to float32 on the way; not the weight. Of float8,
    # XLA:CPU copies the bytes.
    copied = SIZE * SIZE if arguments[1].dtype == "float8_e4m3fn" else 0
    assert compiled.memory_analysis().temp_size_in_bytes - copied < SIZE * SIZE * 2 / 8


def test_shapes_of_groups_that_do_not_fit_are_named():
    values = jnp.zeros((6, 64), jnp.uint8)
    with pytest.raises(ValueError, match=r"values has shape \(6, 64\); .* ask for \(5, 64\)"):
        int8_group_product(jnp.zeros((1, 64)), values, jnp.ones((2, 5)))
    with pytest.raises(ValueError, match="cut into 3 equal groups"):
        int8_group_product(jnp.zeros((1, 64)), values, jnp.ones((3, 6)))
