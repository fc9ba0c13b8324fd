"""New keys, values and token ids land in their slots, in place where the cache is donated."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paged.attention import ragged_paged_attention
from paged.kv_write import write_kv, write_token_ids

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 6, 3, 4, 8
CACHE_SHAPE = (NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def random_rows(num_tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_tokens, NUM_KV_HEADS, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize("backend", ["auto", "xla"])
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


def test_rows_are_rounded_to_the_dtype_of_the_cache():
    k, v = random_rows(2, 3), random_rows(2, 4)
    slots = jnp.array([4, 9], jnp.int32)
    after = np.asarray(write_kv(jnp.zeros(CACHE_SHAPE, jnp.bfloat16), k, v, slots))
    assert after.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(after[1, 0, :, 0], k[0].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(after[2, 1, :, 1], v[1].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_rows_are_scaled_and_saturate_in_an_8_bit_cache(dtype: type):
    k, v = random_rows(2, 3) * 4, random_rows(2, 4)
    k[0, 0, 0], v[1, 2, 5] = 1e6, -1e6
    scales = np.random.default_rng(5).uniform(0.5, 2, (2, NUM_KV_HEADS)).astype(np.float32)
    slots = jnp.array([4, 9], jnp.int32)
    empty = jnp.zeros(CACHE_SHAPE, dtype)
    after = np.asarray(write_kv(empty, k, v, slots, kv_scales=jnp.asarray(scales)))
    assert after.dtype == dtype
    largest = float(ml_dtypes.finfo(dtype).max)
    for rows, index in ((k, 0), (v, 1)):
        scaled = np.clip(rows / scales[index][:, None], -largest, largest).astype(dtype)
        np.testing.assert_array_equal(after[1, index, :, 0], scaled[0])
        np.testing.assert_array_equal(after[2, index, :, 1], scaled[1])
    assert float(after[1, 0, 0, 0, 0]) == largest


def test_padding_touches_only_the_null_block():
    k, v = random_rows(4, 5), random_rows(4, 6)
    slots = jnp.array([7, 0, 0, 0], jnp.int32)
    after = np.asarray(write_kv(jnp.zeros(CACHE_SHAPE, jnp.float32), k, v, slots))
    np.testing.assert_array_equal(after[1, 0, :, 3], k[0])
    assert not after[2:].any()
    assert not after[1, :, :, :3].any()


def test_slot_past_the_end_writes_nothing():
    k, v = random_rows(1, 7), random_rows(1, 8)
    slots = jnp.array([NUM_BLOCKS * BLOCK_SIZE], jnp.int32)
    assert not np.asarray(write_kv(jnp.zeros(CACHE_SHAPE, jnp.float32), k, v, slots)).any()


def test_token_ids_land_in_their_slots():
    before = jnp.full((3, 4), -1, jnp.int32)
    ids, slots = jnp.array([70, 71, 72], jnp.int32), jnp.array([4, 5, 11], jnp.int32)
    after = np.asarray(write_token_ids(before, ids, slots))
    assert after.tolist() == [[-1] * 4, [70, 71, -1, -1], [-1, -1, -1, 72]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(8, 8), (64, 4)])
def test_step_of_two_layers_copies_no_cache(dtype: str, num_tokens: int, num_seqs: int):
    layer = jax.ShapeDtypeStruct((256, 2, 3, 16, 64), dtype)
    token_ids = jax.ShapeDtypeStruct((256, 16), jnp.int32)

    def step(layers, token_ids, q, k, block_tables, seq_lens, query_start_loc, slots):
        updated = []
        for cache in layers:
            cache = write_kv(cache, k, k, slots)
            q = ragged_paged_attention(q, cache, block_tables, seq_lens, query_start_loc)
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


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="backend='stone' is unknown"):
        jax.eval_shape(lambda *args: write_kv(*args, backend="stone"), CACHE, ROWS, ROWS, SLOTS)
