"""Rotary frequencies and rotation against formulas written out, pair by pair, in plain Python."""

import cmath
import math

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import ArrayLike

from paged import rope_write
from paged.models.rope import attention_factor, inverse_frequencies, rope_cos_sin
from paged.models.rope_config import RopeConfig

HEAD_DIM = 64
THETA = 10000.0
# float32 results of float64 arithmetic.
TOLERANCE = 2e-7

DEFAULT = RopeConfig()
LLAMA3 = RopeConfig("llama3", 500000.0, 8.0, 8192, 1.0, 4.0)
YARN = RopeConfig("yarn", THETA, 4.0, 2048)


def plain(theta: float, pair: int) -> float:
    return 1 / theta ** (2 * pair / HEAD_DIM)


def llama3(pair: int) -> float:
    frequency = plain(LLAMA3.theta, pair)
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def yarn(pair: int, truncate: bool) -> float:
    def dimension(rotations: float) -> float:
        return HEAD_DIM * math.log(2048 / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
    extrapolated = plain(THETA, pair)
    return extrapolated / 4 * ramp + extrapolated * (1 - ramp)


def rotate(x: ArrayLike, positions: list[int], config: RopeConfig) -> Array:
    return rope_write.rotate(jnp.asarray(x), *rope_cos_sin(jnp.array(positions), config, HEAD_DIM))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DEFAULT, lambda i: plain(THETA, i)),
        (RopeConfig("linear", THETA, 4.0), lambda i: plain(THETA, i) / 4),
        # The length-dependent formula at length 4 * 2048: theta * (4 * 4 - 3) ** (64 / 62).
        (RopeConfig("dynamic", THETA, 4.0, 2048), lambda i: plain(THETA * 13 ** (64 / 62), i)),
        (LLAMA3, llama3),
        (YARN, lambda i: yarn(i, truncate=True)),
        (RopeConfig("yarn", THETA, 4.0, 2048, truncate=False), lambda i: yarn(i, truncate=False)),
    ],
    ids=["default", "linear", "dynamic", "llama3", "yarn", "yarn-untruncated"],
)
def test_frequencies_equal_the_formula(config: RopeConfig, expected: object) -> None:
    frequencies = inverse_frequencies(config, HEAD_DIM)
    assert frequencies.dtype == np.float32
    written_out = [expected(pair) for pair in range(HEAD_DIM // 2)]  # type: ignore[operator]
    np.testing.assert_allclose(frequencies, written_out, rtol=TOLERANCE)


def test_yarn_with_one_correction_dimension_is_a_step() -> None:
    # beta_fast equal to beta_slow, untruncated: both ends of the ramp fall on one point.
    config = RopeConfig("yarn", THETA, 4.0, 2048, beta_fast=4.0, beta_slow=4.0, truncate=False)
    ratio = inverse_frequencies(config, HEAD_DIM) / inverse_frequencies(DEFAULT, HEAD_DIM)
    assert set(np.round(ratio, 5)) == {1.0, 0.25}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DEFAULT, 1.0),
        (LLAMA3, 1.0),
        (YARN, 0.1 * math.log(4) + 1),
        (RopeConfig("yarn", factor=1.0, original_max_position_embeddings=8), 1.0),
        (RopeConfig("yarn", factor=4.0, attention_factor=1.25), 1.25),
        (
            RopeConfig("yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.707),
            (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1),
        ),
    ],
)
def test_attention_factor(config: RopeConfig, expected: float) -> None:
    assert attention_factor(config) == pytest.approx(expected, rel=1e-12)


def test_rotation_multiplies_pairs_by_a_unit_complex_number() -> None:
    rng = np.random.default_rng(0)
    positions = [0, 1, 257, 4095]
    x = rng.standard_normal((len(positions), 3, HEAD_DIM), np.float32)
    rotated = np.asarray(rotate(x, positions, DEFAULT))
    for token, position in enumerate(positions):
        for pair in range(HEAD_DIM // 2):
            turn = cmath.exp(1j * position * plain(THETA, pair))
            expected = (x[token, :, pair] + 1j * x[token, :, pair + HEAD_DIM // 2]) * turn
            # Angles of thousands of radians in float32 are off by up to 1e-4.
            np.testing.assert_allclose(rotated[token, :, pair], expected.real, atol=1e-3)
            np.testing.assert_allclose(
                rotated[token, :, pair + HEAD_DIM // 2], expected.imag, atol=1e-3
            )


def test_yarn_scales_cosine_and_sine_by_its_attention_factor() -> None:
    cos, sin = rope_cos_sin(jnp.arange(5), YARN, HEAD_DIM)
    np.testing.assert_allclose(np.hypot(cos, sin), 0.1 * math.log(4) + 1, rtol=1e-6)


def test_products_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, HEAD_DIM), np.float32)

    def product(q_position: int, k_position: int) -> float:
        return float(jnp.sum(rotate(q, [q_position], LLAMA3) * rotate(k, [k_position], LLAMA3)))

    assert product(7, 3) == pytest.approx(product(1007, 1003), abs=1e-3)
    assert product(7, 3) != pytest.approx(product(8, 3), abs=1e-3)


def test_bfloat16_heads_are_rotated_by_float32_angles() -> None:
    # bfloat16 rounds 257 to 256, and the first pair turns by one radian per position.
    x = jnp.ones((2, 1, HEAD_DIM), jnp.bfloat16)
    rotated = rotate(x, [256, 257], DEFAULT)
    assert rotated.dtype == jnp.bfloat16
    first = np.asarray(rotated, np.float32)[:, 0, 0]
    expected = np.cos([256.0, 257.0]) - np.sin([256.0, 257.0])
    np.testing.assert_allclose(first, expected, atol=0.01)
