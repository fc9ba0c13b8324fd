"""Whole blocks move with all their layers and token ids, in place, and nothing else changes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.block_copy import BlockCopier, copy_blocks, gather_blocks, scatter_blocks
from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.models.compilation import CompilationCounter
from paged.sharding import KV_CACHE_AXES, ShardingRules, tensor_parallel_mesh

NUM_BLOCKS = 200
SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")

type Arrays = list[np.ndarray]


def random_arrays(dtype: str, seed: int = 0, num_blocks: int = NUM_BLOCKS) -> Arrays:
    """Random content of a cache: the layers', then the token ids."""
    rng = np.random.default_rng(seed)
    shape = SPEC.layer_shape(num_blocks)
    layers = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(SPEC.num_layers)]
    return [*layers, rng.integers(0, 9999, (num_blocks, SPEC.block_size), np.int32)]


def cache_of(arrays: Arrays) -> KVCache:
    *layers, token_ids = (jnp.array(array) for array in arrays)
    return KVCache(tuple(layers), token_ids)


def assert_same(cache: KVCache, expected: Arrays) -> None:
    """Compare bytes (NaN and -0.0 included), the null block aside: nobody reads it."""
    for found, array in zip(jax.tree.leaves(cache), expected, strict=True):
        assert found.dtype == array.dtype
        assert np.asarray(found)[1:].tobytes() == array[1:].tobytes()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def copier(dtype: str) -> BlockCopier:
    made = BlockCopier(cache_of(random_arrays(dtype)))
    made.warmup(tiers=True)
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 33, 128, 150])
def test_gathered_blocks_scattered_elsewhere_are_the_same_bytes(copier, dtype, count: int):
    source, target = random_arrays(dtype, seed=1), random_arrays(dtype, seed=2)
    rng = np.random.default_rng(count)
    read = (rng.permutation(NUM_BLOCKS - 1) + 1)[:count].tolist()
    written = (rng.permutation(NUM_BLOCKS - 1) + 1)[:count].tolist()
    cache, start = cache_of(target), 0
    for blocks in copier.gather(cache_of(source), read):
        ids = written[start : start + blocks.num_blocks]
        cache = copier.scatter(cache, ids, blocks)
        start += blocks.num_blocks
    for from_array, to_array in zip(source, target, strict=True):
        to_array[written] = from_array[read]
    assert_same(cache, target)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 30, 140])
def test_copy_reads_all_before_it_writes_any(copier, dtype, count: int):
    arrays = random_arrays(dtype, seed=3)
    # A chain 1 -> 2 -> 3 ...: writing the first before reading the second would smear it.
    sources, destinations = list(range(1, count + 1)), list(range(2, count + 2))
    cache = copier.copy(cache_of(arrays), sources, destinations)
    for array in arrays:
        array[destinations] = array[sources]  # numpy reads the right side first
    assert_same(cache, arrays)


def test_copies_that_swap_blocks_swap_them(copier, dtype):
    arrays = random_arrays(dtype, seed=4)
    cache = copier.copy(cache_of(arrays), [1, 2, 3], [2, 1, 3])
    for array in arrays:
        array[[2, 1]] = array[[1, 2]]
    assert_same(cache, arrays)


def test_one_block_is_copied_to_many(copier, dtype):
    arrays = random_arrays(dtype, seed=5)
    targets = list(range(20, 160))
    cache = copier.copy(cache_of(arrays), [7] * len(targets), targets)
    for array in arrays:
        array[targets] = array[7]
    assert_same(cache, arrays)


def test_gather_dispatched_before_a_donating_write_sees_the_old_bytes(copier, dtype):
    arrays = random_arrays(dtype, seed=6)
    cache = cache_of(arrays)
    (gathered,) = copier.gather(cache, [9])
    cache = copier.copy(cache, [1], [9])
    expected = [array[9].tobytes() for array in arrays]
    assert [np.asarray(leaf)[0].tobytes() for leaf in jax.tree.leaves(gathered)] == expected


def test_warm_copier_compiles_nothing(copier, dtype):
    cache = cache_of(random_arrays(dtype))
    with CompilationCounter() as counter:
        for count in (1, 2, 20, 100):
            ids = list(range(1, count + 1))
            for blocks in copier.gather(cache, ids):
                cache = copier.scatter(cache, ids[: blocks.num_blocks], blocks)
            cache = copier.copy(cache, ids, [i + 50 for i in ids])
    assert counter.count == 0


def test_without_tiers_only_copies_are_compiled():
    # A shape of its own: JAX would answer for one that another test has compiled.
    copier = BlockCopier(cache_of(random_arrays("float32", num_blocks=77)))
    with CompilationCounter() as counter:
        copier.warmup()
    assert counter.count == len(copier.sizes)
    with pytest.raises(RuntimeError, match=r"Call warmup\(tiers=True\) before gather\(\)"):
        copier.gather(cache_of(random_arrays("float32", num_blocks=77)), [1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 8, 32])
def test_programs_copy_no_cache(dtype: str, size: int):
    layer = jax.ShapeDtypeStruct((4096, 2, 3, 16, 64), dtype)
    cache = KVCache((layer, layer), jax.ShapeDtypeStruct((4096, 16), jnp.int32))
    row = jax.ShapeDtypeStruct((size, 2, 3, 16, 64), dtype)
    rows = KVCache((row, row), jax.ShapeDtypeStruct((size, 16), jnp.int32))
    ids = jax.ShapeDtypeStruct((size,), jnp.int32)
    row_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows))
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    programs = {
        "gather": jax.jit(gather_blocks).lower(cache, ids),
        "scatter": jax.jit(scatter_blocks, donate_argnums=0).lower(cache, ids, rows),
        "copy": jax.jit(copy_blocks, donate_argnums=0).lower(cache, ids, ids),
    }
    for name, lowered in programs.items():
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == (0 if name == "gather" else cache_bytes)
        assert memory.temp_size_in_bytes <= 2 * row_bytes, name
        assert not re.findall(r"\[4096,2,3,16,64\]\S* copy\(", compiled.as_text()), name


def test_sharded_cache_keeps_its_placement():
    sharding = ShardingRules().named_sharding(tensor_parallel_mesh(2), KV_CACHE_AXES)
    *layers, token_ids = random_arrays("float32", seed=7)
    placed = tuple(jax.device_put(layer, sharding) for layer in layers)
    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    cache = KVCache(placed, jax.device_put(token_ids, replicated))
    copier = BlockCopier(cache)
    copier.warmup(tiers=True)
    (blocks,) = copier.gather(cache, [5])
    cache = copier.copy(copier.scatter(cache, [6], blocks), [6], [7])
    for array in (*layers, token_ids):
        array[[6, 7]] = array[5]
    assert_same(cache, [*layers, token_ids])
    assert {leaf.sharding for leaf in cache.layers} == {sharding}
    assert {leaf.sharding for leaf in blocks.layers} == {sharding}


@pytest.mark.parametrize("block_bytes", [2**10, 2**21, 2**23, 2**28])
def test_sizes_of_a_split_hold_all_blocks_with_little_padding(block_bytes: int):
    layer = jax.ShapeDtypeStruct((9, 2, 1, 1, block_bytes // 8), jnp.float32)
    copier = BlockCopier(KVCache((layer,), jax.ShapeDtypeStruct((9, 1), jnp.int32)))
    assert copier.sizes[0] == 1
    assert copier.sizes[-1] * block_bytes <= 2**27 or copier.sizes == (1,)
    before = 0
    for count in range(1, 400):
        sizes = copier.split(count)
        assert set(sizes) <= set(copier.sizes)
        assert count <= sum(sizes) < 2 * count + 1
        assert sum(sizes[:-1]) < count, "only the last has padding"
        assert sum(sizes) >= before, "staging memory for more blocks holds fewer ones too"
        before = sum(sizes)


def test_block_bytes_are_those_of_the_spec_and_the_token_ids():
    copier = BlockCopier(allocate_kv_cache(SPEC, 4))
    assert copier.block_bytes == SPEC.bytes_per_block + 4 * SPEC.block_size


@pytest.mark.parametrize("wrong", [0, -1, NUM_BLOCKS])
def test_block_outside_the_pool_is_refused(copier, dtype, wrong: int):
    cache = cache_of(random_arrays(dtype))
    message = f"has {wrong}; blocks are 1 to {NUM_BLOCKS - 1}"
    with pytest.raises(ValueError, match=f"block_ids {message}"):
        copier.gather(cache, [1, wrong])
    with pytest.raises(ValueError, match=f"sources {message}"):
        copier.copy(cache, [wrong], [1])


def test_ids_that_do_not_fit_together_are_refused(copier, dtype):
    cache = cache_of(random_arrays(dtype))
    with pytest.raises(ValueError, match="names a block twice"):
        copier.copy(cache, [1, 2], [3, 3])
    with pytest.raises(ValueError, match="1 sources for 2 destinations"):
        copier.copy(cache, [1], [3, 4])
    (one,) = copier.gather(cache, [1])
    with pytest.raises(ValueError, match="2 block_ids for 1 staged blocks"):
        copier.scatter(cache, [1, 2], one)
    ring = list(range(1, 131))
    with pytest.raises(ValueError, match="130 copies form a cycle"):
        copier.copy(cache, ring, [*ring[1:], ring[0]])
