"""MXFP4 against the element type of `ml_dtypes`, and what a weight in it can do."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from paged.models.mxfp4_weight import Mxfp4Weight, widen

CODES = np.arange(16, dtype=np.uint8)


def reference(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], 32)
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return elements * np.exp2(scales.astype(np.float64) - 127)[..., None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_element_and_scale_widens_exactly(dtype: str):
    # All pairs of elements, at scales from the least normal one to one whose largest is finite.
    bytes_ = (CODES[:, None] | CODES[None] << 4).reshape(16, 1, 16)
    scales = np.linspace(3, 250, 16).astype(np.uint8).reshape(16, 1)
    widened = widen(jnp.asarray(bytes_), jnp.asarray(scales), jnp.dtype(dtype))
    assert widened.dtype == dtype
    np.testing.assert_array_equal(np.asarray(widened, np.float64), reference(bytes_, scales))


def test_products_and_rows_are_those_of_the_widened_weight():
    weight = Mxfp4Weight({"mlp": 6, "embed": 64}, rngs=nnx.Rngs(0))
    dense = reference(np.asarray(weight.values[...]), np.asarray(weight.scales[...])).reshape(6, 64)
    assert len(np.unique(dense)) > 10
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    np.testing.assert_allclose(
        weight.multiply(jnp.asarray(x), 6), x @ dense.T, rtol=1e-5, atol=1e-5
    )
    rows = weight.rows(jnp.array([4, 0]), 64, jnp.dtype("float32"))
    np.testing.assert_array_equal(rows, dense[[4, 0]])


def test_it_takes_four_bits_and_a_quarter_for_each_weight():
    weight = Mxfp4Weight({"experts": 2, "mlp": 32, "embed": 64}, rngs=nnx.Rngs(0))
    assert (weight.values[...].nbytes + weight.scales[...].nbytes) * 8 == 4.25 * 2 * 32 * 64
    assert weight.values.get_metadata("out_sharding") == ("experts", "mlp", "embed", None)


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match="axis 'embed' has 33 features"):
        Mxfp4Weight({"mlp": 6, "embed": 33}, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="MXFP4 weights cannot be packed"):
        Mxfp4Weight({"mlp": 6, "embed": 32}, rngs=nnx.Rngs(0)).packed(6)
