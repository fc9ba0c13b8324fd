"""The byte arithmetic of the cache, in the numbers that the field publishes, and its allocation."""

import jax
import numpy as np
import pytest

from paged.kv_cache import KVCacheSpec, allocate_kv_cache

KIB, MIB, GIB = 2**10, 2**20, 2**30


def spec(num_layers: int, num_kv_heads: int, dtype: str = "bfloat16") -> KVCacheSpec:
    return KVCacheSpec(num_layers, num_kv_heads, head_dim=128, block_size=16, dtype=dtype)


QWEN_1_5B = spec(28, 2)
LLAMA_8B = spec(32, 8)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "kib_per_token", "gib_at_32768"),
    [
        pytest.param(28, 2, 28, 0.875, id="Qwen2.5-1.5B"),
        pytest.param(28, 4, 56, 1.75, id="Qwen2.5-7B"),
        pytest.param(80, 8, 320, 10, id="Qwen2.5-72B"),
        pytest.param(28, 28, 392, 12.25, id="Qwen2.5-7B without grouped heads"),
        pytest.param(32, 8, 128, 4, id="Llama-3-8B"),
    ],
)
def test_bytes_per_token(layers: int, kv_heads: int, kib_per_token: int, gib_at_32768: float):
    whole = spec(layers, kv_heads)
    assert whole.bytes_per_token == kib_per_token * KIB
    assert 32768 * whole.bytes_per_token == gib_at_32768 * GIB
    assert spec(layers, kv_heads, "float8_e4m3fn").bytes_per_token * 2 == whole.bytes_per_token
    assert spec(layers, kv_heads, "float32").bytes_per_token == 2 * whole.bytes_per_token


@pytest.mark.parametrize(
    ("layers", "bytes_per_token"),
    [
        # "70.272 KB" in the table of arXiv:2505.09343, which has 516.096 KB for Llama 3.1 405B.
        pytest.param(61, 70_272, id="DeepSeek-V3"),
        pytest.param(27, 31_104, id="DeepSeek-V2-Lite"),
    ],
)
def test_latent_vectors_are_kept_once(layers: int, bytes_per_token: int):
    latent = KVCacheSpec(layers, 1, 512 + 64, block_size=16, dtype="bfloat16", num_planes=1)
    assert latent.bytes_per_token == bytes_per_token
    assert latent.layer_shape(5) == (5, 1, 1, 16, 576)


@pytest.mark.parametrize(("tokens", "total"), [(4864, 139_460_608), (21_520, 617_021_440)])
def test_bytes_of_whole_contexts(tokens: int, total: int):
    assert tokens * QWEN_1_5B.bytes_per_token == total
    assert QWEN_1_5B.blocks_for(tokens) * QWEN_1_5B.bytes_per_block == total
    assert QWEN_1_5B.waste_bytes(tokens) == 0


def test_a_request_of_100_tokens_wastes_12_slots():
    # 12 slots of 128 KiB each. (A published example says 24 MiB: it charged a block per token.)
    assert LLAMA_8B.bytes_per_block == 2 * MIB
    assert LLAMA_8B.blocks_for(100) == 7
    assert 100 * LLAMA_8B.bytes_per_token == 12.5 * MIB
    assert LLAMA_8B.blocks_for(100) * LLAMA_8B.bytes_per_block == 14 * MIB
    assert LLAMA_8B.waste_bytes(100) == 1.5 * MIB == 12 * LLAMA_8B.bytes_per_token


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (112, 7), (113, 8)]
)
def test_blocks_are_rounded_up(tokens: int, blocks: int):
    assert LLAMA_8B.blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    ("available", "blocks"),
    [(GIB, 512), (GIB + 2 * MIB, 513), (2 * MIB - 1, 0), (0, 0), (-MIB, 0)],
)
def test_blocks_that_fit_are_rounded_down(available: int, blocks: int):
    assert LLAMA_8B.blocks_that_fit(available) == blocks


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_every_size_is_at_least_one(name: str):
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        KVCacheSpec(**sizes, dtype="float32")


def test_there_are_one_or_two_planes():
    with pytest.raises(ValueError, match="num_planes=3 must be 1 or 2"):
        KVCacheSpec(1, 1, 8, 16, "float32", num_planes=3)


def test_allocated_cache_has_the_size_that_the_spec_computes():
    small = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
    cache = allocate_kv_cache(small, num_blocks=5)
    assert (cache.num_blocks, cache.block_size) == (5, 4)
    assert [layer.shape for layer in cache.layers] == [small.layer_shape(5)] * 3
    assert sum(layer.nbytes for layer in cache.layers) == 5 * small.bytes_per_block
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(cache))


def test_cache_needs_a_block_beside_the_null_block():
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2: block 0 is the null bl"):
        allocate_kv_cache(LLAMA_8B, num_blocks=1)
