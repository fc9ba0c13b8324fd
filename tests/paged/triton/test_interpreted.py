"""The Triton kernels against the dense oracle, in Triton's interpreter.

What it cannot compute, bfloat16 and float8 as a type, is left to compilation (test_compiled.py).
"""

import dataclasses
import importlib.util

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("missing tool: triton, of the extra `test`", allow_module_level=True)

from paged.gpu.interpreter import interpret
from paged.triton.kernels.combine import combine_kernel
from paged.triton.launch import Launch
from tests.paged.oracle import Batch, Shape, assert_matches, make_batch
from tests.paged.triton import interpreted

# Groups of 1, 3, 4 and 7 q heads; every kind of head size; windows that end inside of tiles.
DECODE = Shape(6, 6, 24, 16, 2, 4, 64)
MIXED = Shape(96, 5, 20, 16, 2, 4, 64)
WINDOW = Shape(130, 4, 24, 16, 1, 3, 64, sliding_window=70)
FEATURES = {
    "decode_cap_sinks": Shape(6, 6, 20, 32, 1, 1, 64, soft_cap=5.0, has_sinks=True),
    "decode_window_sinks": Shape(6, 6, 24, 16, 1, 4, 64, sliding_window=200, has_sinks=True),
    "decode_e4m3": Shape(
        6, 6, 6, 64, 2, 4, 64, "float16", cache_dtype="float8_e4m3fn", has_kv_scales=True
    ),
    "mixed_float16": Shape(96, 5, 20, 16, 1, 7, 80, "float16", soft_cap=20.0, scale=0.2),
    "mixed_e4m3": Shape(
        96, 5, 3, 128, 1, 3, 96, "float16", cache_dtype="float8_e4m3fn", has_kv_scales=True
    ),
    "mixed_scales_sinks": Shape(96, 5, 20, 16, 2, 3, 64, has_kv_scales=True, has_sinks=True),
    "window_cap": dataclasses.replace(WINDOW, soft_cap=9.0, scale=0.7),
    "narrow_window": Shape(96, 5, 20, 16, 1, 4, 64, sliding_window=5, has_sinks=True),
    "tiles_of_128_rows": Shape(310, 5, 20, 16, 1, 4, 64, "float16"),
    "head_dim_128": Shape(96, 5, 20, 16, 1, 4, 128),
    "head_dim_192": Shape(64, 5, 6, 16, 1, 1, 192),
    "head_dim_256": Shape(6, 6, 10, 16, 1, 2, 256),
}


def batch_of(shape: Shape, seed: int) -> Batch:
    """A decode, a prefill of all of its tokens, a chunk, and a sequence of one token."""
    longest = shape.max_context
    if shape.num_tokens <= shape.num_seqs:
        return make_batch(shape, [(longest, 1), (longest // 2 + 1, 2), (1, 1)], seed)
    chunk = shape.num_tokens - 45
    return make_batch(shape, [(longest, 1), (37, 37), (longest - 3, chunk), (1, 1)], seed)


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_every_feature_equals_dense_attention(name: str):
    batch = batch_of(FEATURES[name], seed=1)
    assert_matches(interpreted.attend(batch), batch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [DECODE, MIXED, WINDOW], ids=["decode", "mixed", "window"])
def test_random_ragged_batches_equal_dense_attention(shape: Shape, seed: int):
    rng = np.random.default_rng(seed)
    edges = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, shape.max_context]
    seqs: list[tuple[int, int]] = []
    rows_left = shape.num_tokens
    for context in rng.permutation(edges)[: shape.num_seqs].tolist():
        longest = min(context, rows_left)
        if longest:
            query = int(rng.choice([1, longest, rng.integers(1, longest, endpoint=True)]))
            seqs.append((context, query))
            rows_left -= query
    shared_blocks = 0 if shape.sliding_window else int(rng.integers(4))
    batch = make_batch(shape, seqs, seed, shared_blocks)
    assert_matches(interpreted.attend(batch), batch)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("edge", [16, 64, 128, 256])
def test_lengths_beside_block_tile_and_part_boundaries(edge: int, offset: int):
    # Blocks of 16, tiles of 16 query rows and 64 keys, parts of 128 keys.
    length = edge + offset
    shape = Shape(310, 3, 20, 16, 1, 4, 64)
    batch = make_batch(shape, [(length, 1), (length, length), (length, min(length, 40))], seed=edge)
    assert_matches(interpreted.attend(batch), batch)


def test_empty_batch_and_empty_sequences_give_zeros():
    empty = make_batch(DECODE, [], seed=2)
    assert_matches(interpreted.attend(empty), empty)
    batch = make_batch(MIXED, [(20, 7), (50, 50), (9, 1)], seed=4)
    tables, seq_lens = np.zeros_like(batch.block_tables), np.zeros_like(batch.seq_lens)
    tables[[0, 2, 4]], seq_lens[[0, 2, 4]] = batch.block_tables[:3], batch.seq_lens[:3]
    starts = np.array([0, 7, 7, 57, 57, 58], np.int32)
    spread = Batch(MIXED, batch.q, batch.kv_cache, tables, seq_lens, starts)
    assert_matches(interpreted.attend(spread), spread)


def test_contexts_in_one_part_need_no_second_kernel():
    batch = batch_of(DECODE, seed=3)
    one_part = interpreted.attend(batch, min_part=DECODE.max_context)
    assert not interpreted.plan(batch, min_part=DECODE.max_context).has_parts
    assert interpreted.plan(batch).has_parts
    assert_matches(one_part, batch)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_rows_are_scaled_rounded_and_written_to_their_slots(dtype: str, has_scales: bool):
    rng = np.random.default_rng(5)
    num_blocks, num_kv_heads, block_size, head_dim = 5, 3, 16, 80
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    cache = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    # Two rows in one block, one in the null block, and one past the end, which is dropped.
    slots = np.array([17, 79, 3, num_blocks * block_size, 18], np.int32)
    # From below the smallest e4m3 to above the largest, with ties, on both sides of zero.
    rows = rng.standard_normal((2, len(slots), num_kv_heads, head_dim)) * 2.0 ** rng.integers(
        -12, 11, (2, len(slots), num_kv_heads, head_dim)
    )
    k, v = rows.astype(np.float32 if dtype != "float16" else np.float16)
    scales = rng.uniform(0.5, 2.0, (2, num_kv_heads)).astype(np.float32) if has_scales else None
    expected = cache.copy()
    for token, slot in enumerate(slots):
        for index, new in enumerate((k, v)):
            row = new[token] if scales is None else new[token] / scales[index][:, None]
            if dtype == "float8_e4m3fn":
                row = np.clip(row, -448, 448)
            if slot < num_blocks * block_size:
                expected[slot // block_size, index, :, slot % block_size] = row.astype(cache.dtype)
    written = interpreted.write_kv(cache, k, v, slots, scales)
    assert written.dtype == cache.dtype
    np.testing.assert_array_equal(written.view(np.uint8), expected.view(np.uint8), strict=True)


def test_every_e4m3_is_written_as_itself():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    finite = codes[np.isfinite(codes)].astype(np.float32)
    midpoints = (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2
    values = np.concatenate([finite, midpoints, np.nextafter(midpoints, np.float32(0))])
    rows = np.zeros((1, 8, 128), np.float32)
    rows.reshape(-1)[: len(values)] = values
    cache = np.zeros((1, 2, 8, 16, 128), ml_dtypes.float8_e4m3fn)
    written = interpreted.write_kv(cache, rows, -rows, np.array([9], np.int32))
    np.testing.assert_array_equal(written[0, 0, :, 9], rows[0].astype(cache.dtype))
    np.testing.assert_array_equal(written[0, 1, :, 9], (-rows[0]).astype(cache.dtype))


def test_interpreter_refuses_bfloat16():
    batch = batch_of(dataclasses.replace(DECODE, dtype="bfloat16"), seed=6)
    with pytest.raises(TypeError, match="cannot read bfloat16; use float32 or float16"):
        interpreted.attend(batch)


def test_interpreter_refuses_kernels_that_were_made_to_be_compiled(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Triton is imported"):
        interpret(Launch(combine_kernel, (1,), (), (), (), None, num_warps=4, num_stages=1))
