"""Every attention backend against the dense oracle, and the promises of the public op."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged import attention
from paged.attention import plan_attention, ragged_paged_attention
from paged.attention_call import AttentionCall
from tests.paged.oracle import Batch, Shape, assert_matches, make_batch

# Few static shapes, because each is compiled once per backend: grouped heads of 1, 3, 4 and 7,
# head dims 8, 64 and 80, blocks of 1 to 64, tables wider and narrower than a chunk.
SHAPES = {
    "decode": Shape(8, 8, 20, 16, 3, 3, 64),
    "decode_bfloat16": Shape(8, 8, 20, 16, 3, 3, 64, "bfloat16"),
    "decode_window": Shape(6, 6, 18, 16, 2, 1, 8, sliding_window=37),
    "mixed": Shape(96, 5, 20, 16, 2, 4, 64),
    "mixed_bfloat16": Shape(160, 4, 10, 32, 1, 7, 80, "bfloat16", soft_cap=20.0),
    "mixed_float16": Shape(72, 4, 24, 8, 2, 1, 8, "float16"),
    "blocks_of_1": Shape(40, 4, 140, 1, 1, 3, 8),
    "blocks_of_5": Shape(70, 3, 55, 5, 2, 3, 8, sliding_window=1),
    "blocks_of_64": Shape(150, 3, 5, 64, 1, 4, 8, soft_cap=5.0, scale=0.7),
    "window": Shape(130, 4, 20, 16, 1, 3, 8, sliding_window=64),
    "fp8_scales": Shape(
        90, 4, 20, 16, 2, 3, 8, cache_dtype="float8_e4m3fn", has_kv_scales=True, has_sinks=True
    ),
    "fp8_e5m2_bfloat16": Shape(
        90, 4, 20, 16, 2, 3, 64, "bfloat16", cache_dtype="float8_e5m2", sliding_window=50
    ),
    "decode_sinks": Shape(8, 8, 20, 16, 2, 4, 64, "bfloat16", soft_cap=9.0, has_sinks=True),
    "one_plane": Shape(70, 4, 20, 16, 1, 16, 72, num_planes=1),
    "one_plane_fp8": Shape(
        40,
        6,
        10,
        16,
        2,
        5,
        24,
        "bfloat16",
        cache_dtype="float8_e4m3fn",
        has_kv_scales=True,
        num_planes=1,
    ),
    "fewer_tokens_than_seqs": Shape(5, 9, 10, 16, 1, 7, 8),
}


# Element types of the queries that a backend leaves to others.
UNSUPPORTED = {"native": ("float16",), "xla": ()}


@pytest.fixture(scope="module", params=["native", "xla"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs once per backend."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


def shapes_of(backend: str) -> dict[str, Shape]:
    return {n: shape for n, shape in SHAPES.items() if shape.dtype not in UNSUPPORTED[backend]}


@functools.cache
def compiled(backend: str, shape: Shape):
    return jax.jit(functools.partial(ragged_paged_attention, backend=backend, **shape.options))


def attend(batch: Batch, backend: str = "xla") -> np.ndarray:
    return np.asarray(
        compiled(backend, batch.shape)(*map(jnp.asarray, batch.arrays), **batch.extras)
    )


@st.composite
def batches(draw: st.DrawFn, shapes: dict[str, Shape]) -> Batch:
    """A ragged batch for one of the shapes, with lengths on and beside every boundary there is."""
    shape = shapes[draw(st.sampled_from(sorted(shapes)))]
    edges = [shape.block_size, 2 * shape.block_size, 64, 128, 256]
    near_edges = [edge + offset for edge in edges for offset in (-1, 0, 1)]
    contexts = st.one_of(
        st.sampled_from([n for n in [1, *near_edges] if 1 <= n <= shape.max_context]),
        st.integers(1, shape.max_context),
    )
    seqs: list[tuple[int, int]] = []
    rows_left = shape.num_tokens
    for _ in range(draw(st.integers(0, shape.num_seqs))):
        context = draw(contexts)
        longest = min(context, rows_left)
        if longest == 0:
            break
        query = draw(st.one_of(st.just(1), st.just(longest), st.integers(1, longest)))
        seqs.append((context, query))
        rows_left -= query
    shared_blocks = draw(st.integers(0, 3)) if shape.sliding_window is None else 0
    return make_batch(shape, seqs, draw(st.integers(0, 2**32 - 1)), shared_blocks)


@hypothesis.settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_any_ragged_batch_equals_dense_attention(backend: str, data: st.DataObject):
    batch = data.draw(batches(shapes_of(backend)))
    assert_matches(attend(batch, backend), batch)


def test_every_shape_serves_full_and_empty_batches(backend: str):
    for shape in shapes_of(backend).values():
        share = max(1, shape.num_tokens // shape.num_seqs)
        seqs = [(shape.max_context, min(share, shape.max_context))] * shape.num_seqs
        full = make_batch(shape, seqs[: shape.num_tokens // share], seed=1)
        empty = make_batch(shape, [], seed=2)
        assert_matches(attend(full, backend), full)
        assert_matches(attend(empty, backend), empty)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("edge", [16, 64, 128, 256])
def test_lengths_beside_block_tile_and_chunk_boundaries(backend: str, edge: int, offset: int):
    # Block 16, tile 64, chunk 128: a decode, a prefill from the start, and a chunk of a prefill.
    length = edge + offset
    tail = min(length, 40)
    shape = Shape(400, 4, 20, 16, 1, 3, 8)
    batch = make_batch(shape, [(length, 1), (length, length), (length, tail)], seed=edge)
    assert_matches(attend(batch, backend), batch)


def test_decode_bucket_serves_sequences_of_several_rows(backend: str):
    batch = make_batch(SHAPES["decode"], [(200, 1), (31, 4), (3, 3)], seed=3)
    assert_matches(attend(batch, backend), batch)


def test_empty_sequences_between_others_own_no_rows(backend: str):
    shape = SHAPES["mixed"]
    batch = make_batch(shape, [(20, 7), (50, 50), (9, 1)], seed=4)
    # The same three sequences with an empty one before each of the last two.
    tables, seq_lens = np.zeros_like(batch.block_tables), np.zeros_like(batch.seq_lens)
    tables[[0, 2, 4]], seq_lens[[0, 2, 4]] = batch.block_tables[:3], batch.seq_lens[:3]
    starts = np.array([0, 7, 7, 57, 57, 58], np.int32)
    spread = Batch(shape, batch.q, batch.kv_cache, tables, seq_lens, starts)
    assert_matches(attend(spread, backend), spread)
    np.testing.assert_array_equal(attend(spread, backend), attend(batch, backend))


def test_shared_prefix_blocks_serve_every_reader(backend: str):
    batch = make_batch(SHAPES["mixed"], [(100, 1), (90, 5), (80, 30)], seed=5, shared_blocks=3)
    assert (batch.block_tables[0, :3] == batch.block_tables[:3, :3]).all()
    assert_matches(attend(batch, backend), batch)


def test_blocks_that_left_the_window_may_be_the_null_block(backend: str):
    batch = make_batch(SHAPES["window"], [(300, 1), (310, 20)], seed=6)
    assert (batch.block_tables[:2, :10] == 0).all()
    assert not np.isfinite(batch.kv_cache[0]).any()
    assert_matches(attend(batch, backend), batch)


def test_result_does_not_depend_on_batch_mates(backend: str):
    shape = SHAPES["decode"]
    together = make_batch(shape, [(100, 1), (317, 1), (5, 1)], seed=7)
    alone = Batch(
        shape,
        together.q,
        together.kv_cache,
        together.block_tables,
        np.array([100, 0, 0, 0, 0, 0, 0, 0], np.int32),
        np.array([0, 1, 1, 1, 1, 1, 1, 1, 1], np.int32),
    )
    np.testing.assert_array_equal(attend(alone, backend)[0], attend(together, backend)[0])


def test_cache_of_another_dtype_than_the_queries(backend: str):
    batch = make_batch(SHAPES["decode"], [(40, 1), (7, 1)], seed=8)
    narrow = batch.kv_cache.astype(jnp.bfloat16)
    rounded = Batch(batch.shape, batch.q, narrow.astype(np.float32), *batch.arrays[2:])
    output = ragged_paged_attention(
        *map(jnp.asarray, (batch.q, narrow, *batch.arrays[2:])), backend=backend
    )
    assert output.dtype == jnp.float32
    assert_matches(np.asarray(output), rounded)


def test_auto_is_a_backend_that_works_without_jit():
    batch = make_batch(SHAPES["mixed"], [(20, 3), (4, 1)], seed=9)
    assert_matches(ragged_paged_attention(*map(jnp.asarray, batch.arrays)), batch)


def call_of(shape: Shape) -> AttentionCall:
    return AttentionCall(
        num_tokens=shape.num_tokens,
        num_q_heads=shape.num_kv_heads * shape.queries_per_kv,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        q_dtype=shape.dtype,
        kv_cache_dtype=shape.cache_dtype or shape.dtype,
        sliding_window=shape.sliding_window,
        num_planes=shape.num_planes,
    )


@pytest.mark.parametrize("name", ["mixed", "mixed_float16"])
def test_auto_plans_and_attends_by_one_backend_that_has_the_dtype(native, name: str):
    shape = SHAPES[name]
    batch = make_batch(shape, [(130, 1), (33, 20)], seed=11)
    plan = plan_attention(*map(jnp.asarray, batch.arrays[2:]), call_of(shape))
    output = ragged_paged_attention(*map(jnp.asarray, batch.arrays), plan=plan)
    assert_matches(output, batch)
    # The kernel's plan is three arrays; it has no float16.
    assert (len(jax.tree.leaves(plan)) == 3) == (name == "mixed")


def test_native_refuses_what_it_has_no_kernel_for(native):
    op = functools.partial(ragged_paged_attention, backend="native")
    with pytest.raises(NotImplementedError, match=r"'native' does not .*, not in float16; use 'au"):
        jax.eval_shape(op, *changed(Q, VALID[Q].shape, "float16"))
    with pytest.raises(NotImplementedError, match=r"reads a cache of .*, not of float16"):
        jax.eval_shape(op, *changed(CACHE, VALID[CACHE].shape, "float16"))


@pytest.mark.parametrize("name", ["decode", "mixed", "window", "one_plane"])
def test_plan_made_once_serves_every_layer(backend: str, name: str):
    shape = SHAPES[name]
    seqs = [(130, 1), (33, 2), (70, 1)]
    layers = [make_batch(shape, seqs, seed=seed) for seed in (10, 10)]
    layers[1] = Batch(shape, -layers[1].q, layers[1].kv_cache, *layers[1].arrays[2:])
    tables = [jnp.asarray(array) for array in layers[0].arrays[2:]]
    plan = plan_attention(*tables, call_of(shape), backend=backend)
    planned = jax.jit(functools.partial(ragged_paged_attention, backend=backend, **shape.options))
    for layer in layers:
        assert_matches(planned(*map(jnp.asarray, layer.arrays), plan=plan), layer)


def test_backend_that_cannot_serve_a_call_gives_its_reason(monkeypatch: pytest.MonkeyPatch):
    # "xla" takes every call, so a module that takes none stands in for the backends that do not.
    modules = {"xla": "tests.paged.refusing_backend"}
    monkeypatch.setattr(attention, "_MODULES", modules)
    with pytest.raises(NotImplementedError, match="'xla' does not support this call: head_dim=64 "):
        jax.eval_shape(functools.partial(ragged_paged_attention, backend="xla"), *VALID)


def abstract_call(shape: Shape, num_blocks: int = 64) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of the op as shapes alone."""
    q = (shape.num_tokens, shape.num_kv_heads * shape.queries_per_kv, shape.head_dim)
    cache = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    tables = (shape.num_seqs, shape.max_blocks_per_seq)
    shapes = [(q, shape.dtype), (cache, shape.dtype), (tables, "int32")]
    shapes += [((shape.num_seqs,), "int32"), ((shape.num_seqs + 1,), "int32")]
    return tuple(jax.ShapeDtypeStruct(*each) for each in shapes)


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(8, 8), (128, 8)])
def test_xla_needs_no_more_memory_for_wider_block_tables(num_tokens: int, num_seqs: int):
    def temporary_bytes(max_blocks: int) -> int:
        shape = Shape(num_tokens, num_seqs, max_blocks, 16, 3, 3, 64)
        op = jax.jit(functools.partial(ragged_paged_attention, backend="xla"))
        return op.lower(*abstract_call(shape)).compile().memory_analysis().temp_size_in_bytes

    # What may grow is each tile's row of the block table; there are at most as many tiles as
    # rows, in whole groups of 8, and one copy of them by group.
    max_tiles = num_seqs + num_tokens + 8
    assert temporary_bytes(512) - temporary_bytes(16) <= 2 * max_tiles * 512 * 4


VALID = abstract_call(SHAPES["mixed"])


def changed(position: int, shape: tuple[int, ...], dtype: str | None = None):
    """The valid arguments with one array of another shape or dtype."""
    arrays = list(VALID)
    arrays[position] = jax.ShapeDtypeStruct(shape, dtype or arrays[position].dtype)
    return arrays


Q, CACHE, TABLES, LENS, STARTS = range(5)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        (changed(Q, (96, 512)), ValueError, r"q has shape \(96, 512\)"),
        (changed(Q, (96, 8, 64), "int32"), TypeError, "q has dtype int32"),
        (changed(Q, (96, 7, 64)), ValueError, "num_q_heads=7 must be a multiple of num_kv_heads=2"),
        (changed(Q, (96, 8, 32)), ValueError, "q has head_dim=32 and kv_cache has head_dim=64"),
        (changed(CACHE, (64, 3, 2, 16, 64)), ValueError, r"kv_cache has shape \(64, 3, 2, 16, 64"),
        (
            changed(CACHE, (64, 0, 2, 16, 64)),
            ValueError,
            r"it must be one layer, \[num_blocks, 1 or",
        ),
        (changed(CACHE, (64, 2, 2, 16)), ValueError, r"kv_cache has shape \(64, 2, 2, 16\)"),
        (changed(CACHE, (64, 2, 2, 16, 64), "int8"), TypeError, "kv_cache has dtype int8"),
        (changed(TABLES, (5,)), ValueError, r"block_tables has shape \(5,\)"),
        (changed(TABLES, (5, 0)), ValueError, r"block_tables has shape \(5, 0\)"),
        (changed(TABLES, (5, 20), "uint32"), TypeError, "block_tables has dtype uint32"),
        (changed(LENS, (4,)), ValueError, r"seq_lens has shape \(4,\); .* asks for \(5,\)"),
        (changed(LENS, (5,), "float32"), TypeError, "seq_lens has dtype float32"),
        (changed(STARTS, (5,)), ValueError, r"query_start_loc has shape \(5,\); .* \(6,\)"),
        (changed(STARTS, (6,), "int16"), TypeError, "query_start_loc has dtype int16"),
    ],
)
def test_wrong_array_is_named(arrays, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        jax.eval_shape(ragged_paged_attention, *arrays)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, r"scale=0.0 must be positive"),
        ({"sliding_window": 0}, ValueError, "sliding_window=0 must be at least 1"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap=-1.0 must be positive"),
        ({"kv_scales": np.ones((2, 3), np.float32)}, ValueError, r"kv_scales has shape \(2, 3\)"),
        ({"kv_scales": np.ones((2, 2), np.int32)}, TypeError, "kv_scales has dtype int32"),
        ({"sinks": np.zeros(7, np.float32)}, ValueError, r"sinks has shape \(7,\); .* \[8\]"),
        ({"sinks": np.zeros(8, np.int32)}, TypeError, "sinks has dtype int32"),
        ({"backend": "stone"}, ValueError, "backend='stone' is unknown"),
    ],
)
def test_wrong_option_is_named(options, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(ragged_paged_attention, **options), *VALID)
