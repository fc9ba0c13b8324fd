"""The attention and write kernels equal the dense oracle, at every instruction set of this CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.native import library
from paged.native.attention import paged_attention
from paged.native.kv_write import paged_kv_write
from tests.paged.oracle import Batch, Shape, assert_matches, make_batch

# What the kernel does in a special way: head sizes that fill no vector, or no pair of bfloat16;
# block sizes that divide no chunk; groups of heads larger than a tile; caches of each type.
SHAPES = {
    "head_of_37": Shape(60, 4, 40, 7, 2, 3, 37),
    "head_of_37_bfloat16": Shape(60, 4, 40, 7, 2, 3, 37, "bfloat16"),
    "head_of_1": Shape(40, 3, 40, 16, 1, 2, 1, "bfloat16"),
    "head_of_80_bfloat16": Shape(60, 4, 20, 16, 1, 100, 80, "bfloat16"),
    "head_of_96": Shape(60, 4, 60, 16, 1, 9, 96, cache_dtype="bfloat16", sliding_window=700),
    "head_of_128": Shape(60, 4, 60, 16, 1, 8, 128, "bfloat16", cache_dtype="float8_e4m3fn"),
    "float32_cache": Shape(60, 4, 20, 16, 2, 2, 64, "bfloat16", cache_dtype="float32"),
    "latent": Shape(24, 3, 10, 16, 1, 16, 576, "bfloat16", num_planes=1),
    "latent_of_many_heads": Shape(24, 3, 10, 16, 1, 100, 72, num_planes=1),
    "e5m2_cache": Shape(60, 4, 20, 16, 2, 2, 40, cache_dtype="float8_e5m2", has_kv_scales=True),
}
SPLIT = Shape(12, 4, 140, 16, 2, 3, 64, "bfloat16", has_sinks=True)


@pytest.fixture(autouse=True, params=range(len(library.LEVELS)), ids=library.LEVELS)
def level(native, request) -> int:
    """Each test runs once per instruction set that this CPU has."""
    if request.param > library.best_level():
        pytest.skip(f"this CPU lacks {library.LEVELS[request.param]}")
    return request.param


@functools.cache
def compiled(shape: Shape, level: int):
    options = shape.options | {"scale": shape.scale or shape.head_dim**-0.5}
    return jax.jit(functools.partial(paged_attention, level=level, **options))


def attend(batch: Batch, level: int) -> np.ndarray:
    return np.asarray(compiled(batch.shape, level)(*map(jnp.asarray, batch.arrays), **batch.extras))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_odd_shapes_equal_dense_attention(level: int, name: str):
    shape = SHAPES[name]
    longest = min(shape.max_context, 200)
    for seed, seqs in enumerate(
        ([(longest, 1), (1, 1), (65, 1)], [(longest, 9), (33, 2), (64, 11)], [(17, 17)])
    ):
        batch = make_batch(shape, seqs, seed)
        assert_matches(attend(batch, level), batch)


@pytest.mark.parametrize("window", [None, 600, 1500])
def test_contexts_that_are_split_over_threads(level: int, window: int | None):
    shape = dataclasses.replace(SPLIT, sliding_window=window)
    for seqs in ([(2240, 1), (513, 1), (512, 1)], [(1900, 5), (1025, 7)]):
        batch = make_batch(shape, seqs, seed=1)
        assert_matches(attend(batch, level), batch)


def test_splits_do_not_depend_on_batch_mates(level: int):
    together = make_batch(SPLIT, [(2000, 1), (1500, 3), (40, 2)], seed=2)
    alone = dataclasses.replace(
        together,
        seq_lens=np.array([0, 1500, 0, 0], np.int32),
        query_start_loc=np.array([0, 1, 4, 4, 4], np.int32),
    )
    np.testing.assert_array_equal(attend(alone, level)[1:4], attend(together, level)[1:4])


def test_a_prefill_in_chunks_gives_the_same_bits(level: int):
    shape = Shape(200, 2, 20, 16, 2, 3, 64, "bfloat16")
    whole = make_batch(shape, [(180, 180)], seed=3)
    expected = attend(whole, level)
    for start, stop in ((0, 50), (50, 51), (51, 180)):
        q = np.zeros_like(whole.q)
        q[: stop - start] = whole.q[start:stop]
        chunk = dataclasses.replace(
            whole,
            q=q,
            seq_lens=np.array([stop, 0], np.int32),
            query_start_loc=np.array([0, stop - start, stop - start], np.int32),
        )
        np.testing.assert_array_equal(attend(chunk, level)[: stop - start], expected[start:stop])


def test_malformed_batches_end_no_process(level: int):
    shape = Shape(40, 3, 4, 16, 1, 2, 16)
    batch = make_batch(shape, [(60, 1), (30, 20)], seed=4)
    for seq_lens, starts, table in (
        ([10**6, -5, 7], [0, 1, 21, 40], 10**9),
        ([60, 30, 0], [-3, 500, 2, 10**9], -1),
        # More rows than context: those before its start see nothing.
        ([5, 30, 0], [0, 20, 40, 40], 0),
    ):
        tables = np.full_like(batch.block_tables, table)
        wrong = dataclasses.replace(
            batch,
            block_tables=tables,
            seq_lens=np.array(seq_lens, np.int32),
            query_start_loc=np.array(starts, np.int32),
        )
        output = attend(wrong, level)
    assert not output[:15].any()


def test_nan_in_a_context_is_not_hidden(level: int):
    batch = make_batch(Shape(8, 2, 8, 16, 1, 2, 64, "bfloat16"), [(40, 1), (40, 2)], seed=5)
    block = batch.block_tables[0, 0]
    batch.kv_cache[block, 0, 0, 3] = np.nan
    output = attend(batch, level).astype(np.float32)
    assert np.isnan(output[0]).all()
    assert np.isfinite(output[1:3]).all()


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_written_rows_are_what_numpy_rounds_to(level: int, cache_dtype: str):
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 300, 3, 20)).astype(np.float32)
    # A few far below the smallest normal value, and a NaN.
    k[:, 0] *= 2.0 ** -rng.integers(0, 30, (300, 1))
    k[7, 1, 2] = np.nan
    cache = jnp.zeros((20, 2, 3, 16, 20), cache_dtype)
    slots = rng.permutation(320)[:300].astype(np.int32)
    after = np.asarray(paged_kv_write(cache, k, v, jnp.asarray(slots), None, level=level))
    dtype = after.dtype
    rows = after[slots // 16, :, :, slots % 16].astype(np.float32)
    for index, array in ((0, k), (1, v)):
        np.testing.assert_array_equal(rows[:, index], array.astype(dtype).astype(np.float32))
