"""Rotation of queries and keys and the write to the cache, as one op."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paged.rope_write import rotate, rotate_and_write_kv

NUM_TOKENS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 70, 6, 2, 24, 16
CACHE_SHAPE = (8, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


@pytest.fixture(params=["native", "xla"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs once per backend."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turn each pair (i, i + half) as a complex number, in float64."""
    half = angles.shape[1]
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


# The whole head, a part of it with an even and an odd number of pairs, and nothing.
@pytest.mark.parametrize("half_dim", [12, 4, 5, 0])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")],
)
def test_rotates_queries_and_puts_rotated_keys_into_their_slots(
    backend: str, half_dim: int, dtype: str, cache_dtype: str
):
    rng = np.random.default_rng(half_dim)
    q, k, v = (
        rng.standard_normal((NUM_TOKENS, heads, HEAD_DIM)).astype(jnp.dtype(dtype))
        for heads in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    angles = rng.uniform(-3, 3, (NUM_TOKENS, half_dim)).astype(np.float32)
    slots = rng.permutation(np.arange(BLOCK_SIZE, 8 * BLOCK_SIZE))[:NUM_TOKENS].astype(np.int32)
    scales = None
    if cache_dtype == "float8_e4m3fn":
        scales = rng.uniform(0.5, 2, (2, NUM_KV_HEADS)).astype(np.float32)
    q_rotated, cache = rotate_and_write_kv(
        *map(jnp.asarray, (q, k, v)),
        jnp.full(CACHE_SHAPE, 7, cache_dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(slots),
        kv_scales=None if scales is None else jnp.asarray(scales),
        backend=backend,
    )
    assert q_rotated.dtype == dtype
    # One rounding to each type.
    unit = {"float32": 2**-22, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
    size = np.abs(q.astype(np.float64)).max() * 2
    expected = rotated(q.astype(np.float64), angles)
    np.testing.assert_allclose(
        np.asarray(q_rotated, np.float64), expected, rtol=0, atol=size * unit[dtype]
    )
    cache = np.asarray(cache).astype(np.float64)
    written = cache[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE]
    if scales is not None:
        written = written * scales[:, :, None]
    for rows, array in ((rotated(k.astype(np.float64), angles), written[:, 0]), (v, written[:, 1])):
        limit = 4 * unit[cache_dtype]
        np.testing.assert_allclose(array, rows.astype(np.float64), rtol=limit, atol=limit)
    others = np.ones(8 * BLOCK_SIZE, bool)
    others[slots] = False
    free = np.flatnonzero(others)
    assert (cache[free // BLOCK_SIZE, :, :, free % BLOCK_SIZE] == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_are_values_are_rotated_alike(backend: str, dtype: str):
    rng = np.random.default_rng(5)
    q, k = (
        rng.standard_normal((20, heads, HEAD_DIM)).astype(jnp.dtype(dtype))
        for heads in (NUM_Q_HEADS, 1)
    )
    angles = rng.uniform(-3, 3, (20, 4)).astype(np.float32)
    slots = np.arange(BLOCK_SIZE, BLOCK_SIZE + 20, dtype=np.int32)
    q_rotated, cache = rotate_and_write_kv(
        jnp.asarray(q),
        jnp.asarray(k),
        None,
        jnp.full((4, 1, 1, BLOCK_SIZE, HEAD_DIM), 7, dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(slots),
        backend=backend,
    )
    limit = {"float32": 2**-20, "bfloat16": 2**-6}[dtype]
    cache = np.asarray(cache, np.float64)
    for array, rows in (
        (np.asarray(q_rotated, np.float64), q),
        (cache[slots // BLOCK_SIZE, 0, :, slots % BLOCK_SIZE], k),
    ):
        expected = rotated(rows.astype(np.float64), angles)
        np.testing.assert_allclose(array, expected, rtol=limit, atol=limit)
    assert (cache[0] == 7).all()
    assert (cache[2, 0, 0, 4:] == 7).all()


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e5m2"])
def test_backends_agree_but_for_one_rounding(native, cache_dtype: str):
    rng = np.random.default_rng(3)
    arrays = [
        jnp.asarray(rng.standard_normal((40, heads, 64)), jnp.bfloat16) for heads in (9, 3, 3)
    ]
    angles = jnp.asarray(rng.uniform(-3, 3, (40, 32)), jnp.float32)
    slots = jnp.arange(16, 56, dtype=jnp.int32)
    cache = jnp.zeros((4, 2, 3, 16, 64), cache_dtype)
    results = [
        rotate_and_write_kv(*arrays, cache, jnp.cos(angles), jnp.sin(angles), slots, backend=name)
        for name in ("native", "xla")
    ]
    # Whether a product is rounded before it is added may tip a rounding, rarely.
    for ours, theirs in zip(*results, strict=True):
        bits = np.uint16 if ours.dtype == ml_dtypes.bfloat16 else np.uint8
        differ = np.asarray(ours).view(bits) != np.asarray(theirs).view(bits)
        assert differ.mean() < 1e-2
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=0.25, atol=1e-5
        )


Q = jax.ShapeDtypeStruct((5, 6, 8), jnp.float32)
ROWS = jax.ShapeDtypeStruct((5, 3, 8), jnp.float32)
CACHE = jax.ShapeDtypeStruct((6, 2, 3, 4, 8), jnp.float32)
ANGLES = jax.ShapeDtypeStruct((5, 4), jnp.float32)
SLOTS = jax.ShapeDtypeStruct((5,), jnp.int32)


@pytest.mark.parametrize(
    ("q", "cos", "sin", "error", "message"),
    [
        (jax.ShapeDtypeStruct((5, 6, 9), jnp.float32), ANGLES, ANGLES, ValueError, "q has shape"),
        (Q, jax.ShapeDtypeStruct((5, 4), jnp.bfloat16), ANGLES, TypeError, "cos has dtype bfloat"),
        (Q, ANGLES, jax.ShapeDtypeStruct((5, 5), jnp.float32), ValueError, "sin has shape"),
        (Q, ANGLES, jax.ShapeDtypeStruct((5, 3), jnp.float32), ValueError, "must be equal"),
    ],
)
def test_wrong_array_is_named(q, cos, sin, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        jax.eval_shape(rotate_and_write_kv, q, ROWS, ROWS, CACHE, cos, sin, SLOTS)


def test_rotation_keeps_lengths_and_depends_on_differences_of_positions():
    rng = np.random.default_rng(4)
    x = np.repeat(rng.standard_normal((1, 1, HEAD_DIM)), 2, axis=0).astype(np.float32)
    y = np.repeat(rng.standard_normal((1, 1, HEAD_DIM)), 2, axis=0).astype(np.float32)
    frequencies = 10.0 ** -np.arange(HEAD_DIM // 2)

    def at(array: np.ndarray, positions: list[int]) -> np.ndarray:
        angles = (np.array(positions)[:, None] * frequencies).astype(np.float32)
        return np.asarray(rotate(jnp.asarray(array), jnp.cos(angles), jnp.sin(angles)))

    near, far = (at(x, [3, 103]) * at(y, [1, 101])).sum(axis=-1)[:, 0]
    assert near == pytest.approx(far, abs=1e-4)
    np.testing.assert_allclose(
        np.linalg.norm(at(x, [3, 103]), axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_padding_and_slots_past_the_end_leave_the_blocks_of_others_alone(backend: str):
    rng = np.random.default_rng(4)
    num_slots = CACHE_SHAPE[0] * BLOCK_SIZE
    # Three tokens of padding in one slot of the null block, two past the end, one at either edge.
    slots = np.array([3, 3, 3, num_slots, num_slots, num_slots - 1, BLOCK_SIZE], np.int32)
    q, k, v = (
        jnp.asarray(rng.standard_normal((len(slots), heads, HEAD_DIM)), jnp.float32)
        for heads in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    angles = jnp.zeros((len(slots), 0), jnp.float32)  # nothing is rotated
    before = np.full(CACHE_SHAPE, 7, np.float32)
    q_after, after = rotate_and_write_kv(
        q, k, v, jnp.asarray(before), angles, angles, jnp.asarray(slots), backend=backend
    )
    expected = before.copy()
    for token, slot in ((5, num_slots - 1), (6, BLOCK_SIZE)):
        block, offset = divmod(slot, BLOCK_SIZE)
        expected[block, 0, :, offset], expected[block, 1, :, offset] = k[token], v[token]
    np.testing.assert_array_equal(np.asarray(after)[1:], expected[1:])
    np.testing.assert_array_equal(np.asarray(q_after), np.asarray(q))
