"""The decoder against a dense model written in numpy, and what it costs to trace and to run."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.metadata import AttentionMetadata
from paged.models.batch import ForwardBatch
from paged.models.config import ModelConfig
from paged.models.forward import (
    abstract_model,
    compute_logits,
    forward,
    init_random_params,
    param_shardings,
)
from paged.models.layers import RMSNorm
from paged.sharding import KV_CACHE_AXES, ShardingRules, tensor_parallel_mesh
from tests.models.dense import dense_logits, random_params
from tests.models.helpers import BLOCK_SIZE, MAX_BLOCKS, PagedModel, prefill_in_chunks

CONFIG = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)
SMOLLM2 = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
GEMMA_27B_SIZE = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=262144,
    hidden_size=5376,
    intermediate_size=21504,
    num_layers=62,
    num_q_heads=32,
    num_kv_heads=16,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)


def abstract_batch(num_tokens: int, num_seqs: int) -> ForwardBatch:
    def ids(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    metadata = AttentionMetadata(
        block_tables=ids(num_seqs, 4),
        seq_lens=ids(num_seqs),
        query_start_loc=ids(num_seqs + 1),
        slot_mapping=ids(num_tokens),
    )
    return ForwardBatch(ids(num_tokens), ids(num_tokens), (metadata,), ids(num_seqs))


def abstract_cache(config: ModelConfig, num_blocks: int, dtype: str) -> KVCache:
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 16, dtype)
    return jax.eval_shape(lambda: allocate_kv_cache(spec, num_blocks))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_a_dense_model_with_every_bias(tied: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    params = random_params(config)
    rng = np.random.default_rng(0)
    prompts = {i: rng.integers(0, 64, length).tolist() for i, length in enumerate((13, 30, 1))}
    model = PagedModel(config, params, dtype="float32")
    logits = prefill_in_chunks(model, prompts, {0: 4, 1: 11, 2: 1})
    for i, prompt in prompts.items():
        np.testing.assert_allclose(
            logits[i], dense_logits(config, params, prompt), atol=2e-4, rtol=1e-5
        )


def test_token_ids_are_kept_beside_their_keys() -> None:
    model = PagedModel(CONFIG, random_params(CONFIG), dtype="float32")
    prompts = {0: [5, 6, 7, 8, 9, 10], 1: [11, 12, 13]}
    prefill_in_chunks(model, prompts, {0: 4, 1: 2})
    stored = np.asarray(model.cache.token_ids)
    for i, prompt in prompts.items():
        table = model.block_tables[0, i]
        assert stored[table].reshape(MAX_BLOCKS * BLOCK_SIZE)[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norm_is_computed_in_float32(dtype: str) -> None:
    # Squares of 300 overflow float16, and bfloat16 rounds a sum of 1.01 ** 2 by up to 0.4 %.
    x = np.tile(np.array([300.0, 3.03], np.float32), 128)[None]
    normed = RMSNorm({"embed": 256}, epsilon=1e-6, dtype=dtype)(jnp.asarray(x, dtype))
    assert normed.dtype == dtype
    rounded = np.asarray(jnp.asarray(x, dtype), np.float64)
    expected = rounded / np.sqrt((rounded**2).mean())
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), expected, rtol=float(jnp.finfo(dtype).eps) / 2
    )


def test_logits_are_float32_of_a_bfloat16_model() -> None:
    config = replace(CONFIG, tie_word_embeddings=True)
    graphdef, _ = abstract_model(config, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params(config))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((5, 32)), jnp.bfloat16)
    logits = compute_logits(graphdef, params, hidden)
    assert logits.dtype == jnp.float32
    table = np.asarray(params["embed"]["weight"][...], np.float32)
    expected = np.asarray(hidden, np.float32) @ table.T
    # Products of bfloat16 are exact in float32; rounding the sums to bfloat16 would show as 1e-2.
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_random_parameters_follow_the_seed() -> None:
    first, again, other = (init_random_params(CONFIG, dtype="bfloat16", seed=s) for s in (0, 0, 1))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first["embed"]["weight"][...] != other["embed"]["weight"][...]).any()


def test_layers_of_one_shape_are_traced_once() -> None:
    graphdef, params = abstract_model(SMOLLM2, dtype="bfloat16")
    cache = abstract_cache(SMOLLM2, 8, "bfloat16")
    jaxpr = jax.make_jaxpr(lambda *args: forward(graphdef, *args))(
        params, cache, abstract_batch(64, 8)
    )
    layers = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.params.get("name") == "_apply_layer"]
    assert len(layers) == SMOLLM2.num_layers
    assert len({id(layer) for layer in layers}) == 1


def test_donated_cache_is_updated_in_place() -> None:
    graphdef, params = abstract_model(CONFIG, dtype="bfloat16")
    num_blocks = 4096  # so large that no other array comes near it
    cache = abstract_cache(CONFIG, num_blocks, "bfloat16")
    step = jax.jit(lambda *args: forward(graphdef, *args), donate_argnums=1)
    compiled = step.lower(params, cache, abstract_batch(16, 4)).compile()
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 10
    copies = re.findall(rf"= \w+\[{num_blocks},[^ ]* copy", compiled.as_text())
    assert copies == []


def test_abstract_model_of_27b_parameters_takes_no_memory() -> None:
    before = jax.live_arrays()  # kept, as the garbage of other tests may be collected meanwhile
    _, state = abstract_model(GEMMA_27B_SIZE, dtype="bfloat16")
    leaves = jax.tree.leaves(state)
    assert sum(leaf.size for leaf in leaves) > 26e9
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    known = set(map(id, before))
    assert [array for array in jax.live_arrays() if id(array) not in known] == []


def test_every_parameter_names_its_axes() -> None:
    _, state = abstract_model(CONFIG, dtype="float32")
    axes = {
        ".".join(map(str, path)): variable.get_metadata("out_sharding")
        for path, variable in nnx.to_flat_state(state)
    }
    assert axes["layers.2.attention.q_proj.weight"] == ("q_heads", "head_dim", "embed")
    assert axes["layers.2.attention.k_proj.bias"] == ("kv_heads", "head_dim")
    assert axes["layers.2.attention.o_proj.weight"] == ("embed", "q_heads", "head_dim")
    assert axes["layers.2.mlp.down_proj.weight"] == ("embed", "mlp")
    assert axes["embed.weight"] == axes["lm_head.weight"] == ("vocab", "embed")


# Sharding


def test_sharded_model_gives_the_same_logits() -> None:
    config = replace(CONFIG, num_q_heads=4)
    params = random_params(config)
    prompts = {0: list(range(20)), 1: list(range(40, 47))}
    chunk_sizes = {0: 6, 1: 3}
    alone = PagedModel(config, params, dtype="float32")
    expected = prefill_in_chunks(alone, prompts, chunk_sizes)

    mesh, rules = tensor_parallel_mesh(2), ShardingRules()
    _, abstract = abstract_model(config, dtype="float32")
    sharded = PagedModel(
        config,
        jax.device_put(params, param_shardings(abstract, rules, mesh)),
        dtype="float32",
        cache_sharding=rules.named_sharding(mesh, KV_CACHE_AXES),
    )
    logits = prefill_in_chunks(sharded, prompts, chunk_sizes)
    for i in prompts:
        # The two devices' partial sums are added in another order.
        np.testing.assert_allclose(logits[i], expected[i], atol=1e-4, rtol=1e-5)
    layer = sharded.cache.layers[0]
    assert layer.sharding.is_equivalent_to(rules.named_sharding(mesh, KV_CACHE_AXES), layer.ndim)
    q_proj = sharded.params["layers"][0]["attention"]["q_proj"]["weight"][...]
    assert {shard.data.shape for shard in q_proj.addressable_shards} == {(2, 8, 32)}


def test_axis_that_does_not_divide_is_named() -> None:
    _, abstract = abstract_model(CONFIG, dtype="float32")
    with pytest.raises(
        ValueError, match=r"'kv_heads' of parameter layers\.0\.attention\.k_proj\.bias has size 2"
    ):
        param_shardings(abstract, ShardingRules(q_heads=None), tensor_parallel_mesh(4))


def test_random_parameters_are_placed() -> None:
    mesh = tensor_parallel_mesh(2)
    _, abstract = abstract_model(CONFIG, dtype="float32")
    shardings = param_shardings(abstract, ShardingRules(), mesh)
    params = init_random_params(CONFIG, dtype="float32", shardings=shardings)
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding
