"""New keys, values and token ids land in their slots, in place where the cache is donated."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paged.attention import ragged_paged_attention
from paged.kv_write import write_kv, write_token_ids
from paged.native.kv_write import WRITE_TARGET
from paged.rope_write import rotate_and_write_kv

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 6, 3, 4, 8
CACHE_SHAPE = (NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def random_rows(num_tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_tokens, NUM_KV_HEADS, HEAD_DIM)).astype(np.float32)


@pytest.fixture(params=["native", "xla"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs once per backend."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


def test_rows_land_in_their_slots_and_nothing_else_changes(backend: str):
    before = np.random.default_rng(0).standard_normal(CACHE_SHAPE).astype(np.float32)
    k, v = random_rows(3, 1), random_rows(3, 2)
    slots = np.array([5, 23, 8], np.int32)
    after = np.asarray(write_kv(jnp.asarray(before), k, v, jnp.asarray(slots), backend=backend))
    expected = before.copy()
    for slot, key, value in zip(slots, k, v, strict=True):
        expected[slot // BLOCK_SIZE, 0, :, slot % BLOCK_SIZE] = key
        expected[slot // BLOCK_SIZE, 1, :, slot % BLOCK_SIZE] = value
    np.testing.assert_array_equal(after, expected)


def test_a_cache_of_one_plane_takes_keys_alone(backend: str):
    before = np.random.default_rng(0).standard_normal(CACHE_SHAPE).astype(np.float32)[:, :1]
    k, slots = random_rows(3, 1), np.array([5, 23, 8], np.int32)
    cache, rows = jnp.asarray(before), jnp.asarray(k)
    after = np.asarray(write_kv(cache, rows, None, jnp.asarray(slots), backend=backend))
    expected = before.copy()
    for slot, key in zip(slots, k, strict=True):
        expected[slot // BLOCK_SIZE, 0, :, slot % BLOCK_SIZE] = key
    np.testing.assert_array_equal(after, expected)


def test_rows_are_rounded_to_the_dtype_of_the_cache(backend: str):
    k, v = random_rows(2, 3), random_rows(2, 4)
    slots = jnp.array([4, 9], jnp.int32)
    empty = jnp.zeros(CACHE_SHAPE, jnp.bfloat16)
    after = np.asarray(write_kv(empty, k, v, slots, backend=backend))
    assert after.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(after[1, 0, :, 0], k[0].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(after[2, 1, :, 1], v[1].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_rows_are_scaled_and_saturate_in_an_8_bit_cache(backend: str, dtype: type):
    k, v = random_rows(2, 3) * 4, random_rows(2, 4)
    k[0, 0, 0], v[1, 2, 5] = 1e6, -1e6
    scales = np.random.default_rng(5).uniform(0.5, 2, (2, NUM_KV_HEADS)).astype(np.float32)
    slots = jnp.array([4, 9], jnp.int32)
    empty = jnp.zeros(CACHE_SHAPE, dtype)
    after = np.asarray(write_kv(empty, k, v, slots, kv_scales=jnp.asarray(scales), backend=backend))
    assert after.dtype == dtype
    largest = float(ml_dtypes.finfo(dtype).max)
    for rows, index in ((k, 0), (v, 1)):
        scaled = np.clip(rows / scales[index][:, None], -largest, largest).astype(dtype)
        np.testing.assert_array_equal(after[1, index, :, 0], scaled[0])
        np.testing.assert_array_equal(after[2, index, :, 1], scaled[1])
    assert float(after[1, 0, 0, 0, 0]) == largest


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_every_8_bit_value_is_rounded_to_nearest_even(backend: str, dtype: type):
    # All values of the type, what lies halfway between neighbours, and next to both.
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    halves = (values[1:] + values[:-1]) / 2
    inputs = np.concatenate([values, halves, np.nextafter(halves, 0), np.nextafter(halves, 1e9)])
    inputs = np.resize(inputs.astype(np.float32), (-(-inputs.size // 24), NUM_KV_HEADS, HEAD_DIM))
    cache = jnp.zeros((len(inputs), 2, NUM_KV_HEADS, 1, HEAD_DIM), dtype)
    slots = jnp.arange(len(inputs), dtype=jnp.int32)
    after = np.asarray(write_kv(cache, inputs, -inputs, slots, backend=backend))
    np.testing.assert_array_equal(after[:, 0, :, 0], inputs.astype(dtype))
    np.testing.assert_array_equal(after[:, 1, :, 0], (-inputs).astype(dtype))


def test_padding_touches_only_the_null_block(backend: str):
    k, v = random_rows(4, 5), random_rows(4, 6)
    slots = jnp.array([7, 0, 0, 0], jnp.int32)
    after = np.asarray(write_kv(jnp.zeros(CACHE_SHAPE, jnp.float32), k, v, slots, backend=backend))
    np.testing.assert_array_equal(after[1, 0, :, 3], k[0])
    assert not after[2:].any()
    assert not after[1, :, :, :3].any()


def test_slot_past_the_end_writes_nothing(backend: str):
    k, v = random_rows(1, 7), random_rows(1, 8)
    slots = jnp.array([NUM_BLOCKS * BLOCK_SIZE], jnp.int32)
    empty = jnp.zeros(CACHE_SHAPE, jnp.float32)
    assert not np.asarray(write_kv(empty, k, v, slots, backend=backend)).any()


def test_token_ids_land_in_their_slots():
    before = jnp.full((3, 4), -1, jnp.int32)
    ids, slots = jnp.array([70, 71, 72], jnp.int32), jnp.array([4, 5, 11], jnp.int32)
    after = np.asarray(write_token_ids(before, ids, slots))
    assert after.tolist() == [[-1] * 4, [70, 71, -1, -1], [-1, -1, -1, 72]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(8, 8), (64, 4)])
def test_step_of_two_layers_copies_no_cache(
    backend: str, dtype: str, num_tokens: int, num_seqs: int
):
    layer = jax.ShapeDtypeStruct((256, 2, 3, 16, 64), dtype)
    token_ids = jax.ShapeDtypeStruct((256, 16), jnp.int32)

    angles = np.ones((num_tokens, 32), np.float32)

    def step(layers, token_ids, q, k, block_tables, seq_lens, query_start_loc, slots):
        updated = []
        for cache in layers:
            cache = write_kv(cache, k, k, slots, backend=backend)
            q, cache = rotate_and_write_kv(q, k, k, cache, angles, angles, slots, backend=backend)
            q = ragged_paged_attention(
                q, cache, block_tables, seq_lens, query_start_loc, backend=backend
            )
            updated.append(cache)
        slot_ids = jnp.arange(num_tokens, dtype=jnp.int32)
        return q, updated, write_token_ids(token_ids, slot_ids, slots)

    def int32s(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(
            [layer, layer],
            token_ids,
            jax.ShapeDtypeStruct((num_tokens, 9, 64), dtype),
            jax.ShapeDtypeStruct((num_tokens, 3, 64), dtype),
            int32s(num_seqs, 32),
            int32s(num_seqs),
            int32s(num_seqs + 1),
            int32s(num_tokens),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    layer_bytes = layer.size * layer.dtype.itemsize
    assert memory.alias_size_in_bytes == 2 * layer_bytes + token_ids.size * 4
    assert memory.temp_size_in_bytes < layer_bytes
    # The cache may also appear as the matrix that attention gathers from; either way, no copy.
    name = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    sizes = rf"{name}\[(256,2,3,16,64|1536,16,64|1536,1024)\]"
    copies = re.findall(rf"^.*= {sizes}\S* copy\(.*$", compiled.as_text(), re.MULTILINE)
    assert copies == []


CACHE = jax.ShapeDtypeStruct(CACHE_SHAPE, jnp.float32)
ROWS = jax.ShapeDtypeStruct((5, NUM_KV_HEADS, HEAD_DIM), jnp.float32)
SLOTS = jax.ShapeDtypeStruct((5,), jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (jax.ShapeDtypeStruct((6, 3, 4, 8), jnp.float32), ROWS, ROWS, SLOTS),
            ValueError,
            r"kv_cache has shape \(6, 3, 4, 8\)",
        ),
        (
            (CACHE, ROWS, None, SLOTS),
            ValueError,
            r"kv_cache has shape .*; for keys alone it must be \[num_blocks, 1, num_kv_heads",
        ),
        (
            (jax.ShapeDtypeStruct((6, 1, 3, 4, 8), jnp.float32), ROWS, ROWS, SLOTS),
            ValueError,
            r"for keys and values it must be \[num_blocks, 2, num_kv_heads",
        ),
        (
            (CACHE, jax.ShapeDtypeStruct((5, 2, 8), jnp.float32), ROWS, SLOTS),
            ValueError,
            r"k has shape \(5, 2, 8\); .* = \(5, 3, 8\)",
        ),
        (
            (CACHE, ROWS, jax.ShapeDtypeStruct((4, 3, 8), jnp.float32), SLOTS),
            ValueError,
            r"v has shape \(4, 3, 8\); .* = \(5, 3, 8\)",
        ),
        (
            (CACHE, ROWS, ROWS, jax.ShapeDtypeStruct((5,), jnp.uint32)),
            TypeError,
            "slot_mapping has dtype uint32; it must be int32",
        ),
    ],
)
def test_wrong_array_is_named(arguments, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        jax.eval_shape(write_kv, *arguments)


def test_a_cache_that_was_copied_is_an_error(native):
    def kernel_without_aliasing(cache, k, v, slots):
        call = jax.ffi.ffi_call(WRITE_TARGET, jax.ShapeDtypeStruct(cache.shape, cache.dtype))
        return call(cache, k, v, slots, jnp.zeros((0, 3), jnp.float32), level=np.int32(-1))

    rows, slots = random_rows(2, 9), jnp.array([4, 9], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="copied instead of updated in place"):
        jax.jit(kernel_without_aliasing)(jnp.zeros(CACHE_SHAPE), rows, rows, slots)


def test_auto_writes_what_native_cannot(native):
    k, v = (random_rows(2, seed).astype(np.float16) for seed in (10, 11))
    slots, empty = jnp.array([4, 9], jnp.int32), jnp.zeros(CACHE_SHAPE, jnp.float16)
    after = np.asarray(write_kv(empty, k, v, slots))
    np.testing.assert_array_equal(after[1, 0, :, 0], k[0])
    with pytest.raises(NotImplementedError, match="it writes bfloat16 or float32, not float16"):
        write_kv(empty, k, v, slots, backend="native")
    with pytest.raises(NotImplementedError, match=r"to a cache of .*, not of float16"):
        write_kv(empty, random_rows(2, 10), random_rows(2, 11), slots, backend="native")
    with pytest.raises(NotImplementedError, match="of one dtype, not of float16, float32"):
        write_kv(empty, k, random_rows(2, 11), slots, backend="native")


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="backend='stone' is unknown"):
        jax.eval_shape(lambda *args: write_kv(*args, backend="stone"), CACHE, ROWS, ROWS, SLOTS)
