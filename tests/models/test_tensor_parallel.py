"""Parts of a model on several devices: sizes, parameters, what the programs tell each other."""

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from paged.kv_cache import KVCacheSpec, allocate_kv_cache
from paged.models.config import ModelConfig
from paged.models.executables import ExecutableStore
from paged.models.forward import abstract_model, init_random_params, split_head
from paged.models.layers import Embed
from paged.models.moe import ExpertLinear
from paged.models.moe_config import ExpertsConfig
from paged.models.packing import BatchLayout
from paged.models.programs import Program
from paged.models.sharded_programs import ShardedPrograms
from paged.models.step import compile_forward, compile_greedy, compile_sample
from paged.models.tensor_parallel import TensorParallel
from paged.models.token_blocks import take_best
from paged.models.weights import load_params
from paged.sharding import KV_CACHE_AXES, ShardingRules, tensor_parallel_mesh
from tests.models.helpers import Jitted, PagedModel, prefill_in_chunks
from tests.models.test_weights import DictSource, hf_shapes

CONFIG = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)
NUM_BLOCKS, BLOCK_SIZE = 512, 4


class RandomSource(DictSource):
    """Tensors of random numbers, of variance 1 / inputs."""

    def read(self, name: str) -> np.ndarray:
        shape, rng = self.shapes[name], np.random.default_rng(len(name))
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


LAYOUT = BatchLayout(16, 4, 16, max_logit_edits=8, vocab_size=CONFIG.vocab_size)


# Sizes


def test_a_part_has_its_share_of_heads_features_and_vocabulary():
    part = TensorParallel(CONFIG, 4).part
    assert (part.num_q_heads, part.num_kv_heads) == (4, 2)
    assert (part.intermediate_size, part.vocab_size) == (24, 128)
    assert (part.hidden_size, part.num_layers) == (64, 2)


def test_kv_heads_are_repeated_where_there_are_more_devices():
    split = TensorParallel(replace(num_kv_heads=2), 8)
    assert split.kv_head_copies == 4
    assert split.whole.num_kv_heads == 8
    assert split.part.num_kv_heads == 1


def replace(**changes: Any) -> ModelConfig:

    return dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "num_q_heads=16 is no multiple of it, .*vocab_size=512 .* that do: 1, 2, 4, 8, 16"),
        ({"intermediate_size": 100}, 8, r"intermediate_size=100 is no multiple.* do: 1, 2, 4\."),
        (
            {"experts": ExpertsConfig(8, 2, intermediate_size=96, is_mxfp4=True)},
            2,
            r"evenly: intermediate_size of the experts / 32=3 is no multiple of it\. .* do: 1\.",
        ),
        (
            {"experts": ExpertsConfig(6, 2, intermediate_size=36), "intermediate_size": 7},
            8,
            r"evenly: intermediate_size of the experts=36 is no multiple of it\. .* do: 1, 2, 4\.",
        ),
        ({"vocab_size": 500}, 8, r"vocab_size=500 is no multiple of it\. Sizes that do: 1, 2, 4\."),
        ({"num_q_heads": 9, "num_kv_heads": 3}, 2, r"num_kv_heads=3 is neither a multiple nor a"),
        (
            {"num_q_heads": 12, "num_kv_heads": 6, "intermediate_size": 48},
            4,
            r"evenly: num_kv_heads=6 is neither .* of it\. Sizes that do: 1, 2\.",
        ),
    ],
)
def test_sizes_that_do_not_divide_name_those_that_do(changes, size: int, message: str):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size} does not split .*{message}"):
        TensorParallel(replace(**changes), size)


def test_experts_that_do_not_divide_are_named():
    config = replace(experts=ExpertsConfig(6, 2, intermediate_size=36))
    rules = ShardingRules(experts="tp")
    with pytest.raises(ValueError, match=r"num_experts=6 is no multiple of it\. .* do: 1, 2\."):
        TensorParallel(config, 4, rules)


def test_rules_that_do_not_cut_into_parts_are_refused():
    rules = ShardingRules(mlp=None)
    with pytest.raises(
        ValueError, match=r"parameter layers\.0\.mlp\.\w+\.\w+ of shape .* is cut to .* by 2 dev"
    ):
        TensorParallel(CONFIG, 2, rules).param_shardings(tensor_parallel_mesh(2), dtype="float32")


# Parameters


@pytest.fixture(scope="module")
def params_of_eight() -> nnx.State:
    """Random parameters of CONFIG on eight devices."""
    shardings = TensorParallel(CONFIG, 8).param_shardings(tensor_parallel_mesh(8), dtype="float32")
    return init_random_params(CONFIG, dtype="float32", shardings=shardings)


def test_each_device_holds_its_share_of_the_parameters(params_of_eight):
    leaves = jax.tree.leaves(params_of_eight)
    held = Counter()
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    whole = sum(leaf.nbytes for leaf in leaves)
    # Norms, and biases of the residual stream, are on all of them.
    everywhere = sum(leaf.nbytes for leaf in leaves if leaf.shape == (CONFIG.hidden_size,))
    assert set(held.values()) == {(whole - everywhere) // 8 + everywhere}
    assert len(held) == 8


def test_copies_of_a_kv_head_lie_on_devices_in_a_row():
    config = replace(num_kv_heads=2)
    mesh, split = tensor_parallel_mesh(8), TensorParallel(config, 8)
    source = RandomSource(hf_shapes(config))
    whole = load_params(config, source, dtype="float32", progress=False)
    params = load_params(
        config,
        source,
        dtype="float32",
        shardings=split.param_shardings(mesh, dtype="float32"),
        kv_head_copies=split.kv_head_copies,
        progress=False,
    )
    for kind in ("weight", "bias"):
        there = params["layers"][1]["attention"]["k_proj"][kind][...]
        here = np.asarray(whole["layers"][1]["attention"]["k_proj"][kind][...])
        for shard in there.addressable_shards:
            head = shard.index[0].start // 4  # kv heads 0, 0, 0, 0, 1, 1, 1, 1
            np.testing.assert_array_equal(shard.data, here[head : head + 1])


# Results


PROMPTS, CHUNK_SIZES = {0: list(range(20)), 1: list(range(40, 47))}, {0: 6, 1: 3}


def check_equal(split: PagedModel, alone: PagedModel) -> None:
    expected = prefill_in_chunks(alone, PROMPTS, CHUNK_SIZES)
    found = prefill_in_chunks(split, PROMPTS, CHUNK_SIZES)
    for i in PROMPTS:
        # The devices' partial sums are added in another order.
        np.testing.assert_allclose(found[i], expected[i], atol=2e-4, rtol=1e-4)


def test_int8_weights_and_a_mesh_axis_of_another_name_give_the_same_logits():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = ShardingRules(vocab="x", q_heads="x", kv_heads="x", mlp="x")
    source, settings = RandomSource(hf_shapes(CONFIG)), {"dtype": "float32", "quantization": "int8"}
    shardings = TensorParallel(CONFIG, 8, rules).param_shardings(mesh, **settings)
    models = []
    for places, split in ((shardings, {"mesh": mesh, "rules": rules}), (None, {})):
        params = load_params(CONFIG, source, **settings, shardings=places, progress=False)
        models.append(PagedModel(CONFIG, params, **settings, **split))
    check_equal(*models)


MIXTURE = ExpertsConfig(
    num_experts=8,
    num_experts_per_token=3,
    intermediate_size=40,
    router_bias=True,
    expert_bias=True,
    dense_layers=(0,),
)


@pytest.fixture(scope="module")
def mixture() -> tuple[ModelConfig, nnx.State, PagedModel]:
    """A dense layer and one of experts, with biases that are not zero."""
    config = replace(experts=MIXTURE)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32),
        init_random_params(config, dtype="float32"),
    )
    return config, params, PagedModel(config, params, dtype="float32")


@pytest.mark.parametrize(
    ("rules", "shape"),
    [
        (ShardingRules(), (8, 40 // 4, 64)),  # a part of each expert
        (ShardingRules(experts="tp"), (8 // 4, 40, 64)),  # some experts
    ],
)
def test_experts_are_split_along_their_features_or_one_from_another(mixture, rules, shape):
    config, params, alone = mixture
    mesh = tensor_parallel_mesh(4)
    shardings = TensorParallel(config, 4, rules).param_shardings(mesh, dtype="float32")
    placed = jax.device_put(params, shardings)
    up_proj = placed["layers"][1]["mlp"]["experts"]["up_proj"]["weight"][...]
    assert {shard.data.shape for shard in up_proj.addressable_shards} == {shape}
    alone.num_computed = [0] * len(alone.num_computed)
    check_equal(PagedModel(config, placed, dtype="float32", mesh=mesh, rules=rules), alone)


@pytest.mark.parametrize("method", ["of_groups", "of_expert"])
def test_biases_of_split_experts_are_added_once(method: str):
    """`of_groups` is what GPUs use, so no model of a test comes by it."""
    rng = np.random.default_rng(0)
    axes = {"experts": 2, "embed": 4, "mlp": 8}
    config = ExpertsConfig(2, 1, intermediate_size=8, expert_bias=True)
    part = ExpertLinear(axes | {"mlp": 4}, config, dtype="float32", rngs=nnx.Rngs(0))
    part.sum_axis = "tp"
    graphdef, state = nnx.split(part)
    mesh, rules = tensor_parallel_mesh(2), ShardingRules()
    weight, bias = rng.standard_normal((2, 4, 8), np.float32), np.ones((2, 4), np.float32)
    state["weight"] = jax.device_put(weight, rules.named_sharding(mesh, tuple(axes)))
    state["bias"] = jax.device_put(bias, rules.named_sharding(mesh, ("experts", "embed")))
    x = rng.standard_normal((5, 8), np.float32)
    ends = jnp.asarray([5, 5], jnp.int32)
    first = {"of_groups": lambda layer, x: layer.of_groups(x, ends, "xla")}
    compute = first.get(method, lambda layer, x: layer.of_expert(jnp.int32(0), x))

    def product(state: nnx.State, x: Array) -> Array:
        return jax.lax.psum(compute(nnx.merge(graphdef, state), x), "tp")

    placed = jax.device_put(x, rules.named_sharding(mesh, (None, "mlp")))
    program = Program("product", product, (state, placed), 0)
    found = ShardedPrograms(mesh, Jitted()).make(program)(state, placed)
    np.testing.assert_allclose(found, x @ weight[0].T + 1, atol=1e-5)


def split_table(table: np.ndarray, function: Any, argument: Array) -> Array:
    """Call a function of an `Embed` whose table is split over eight devices."""
    mesh, rules = tensor_parallel_mesh(8), ShardingRules()
    vocab_size, size = table.shape
    part = Embed(vocab_size // 8, size, dtype="float32", rngs=nnx.Rngs(0))
    part.vocab_axis = "tp"
    graphdef, state = nnx.split(part)
    placed = jax.device_put(table, rules.named_sharding(mesh, ("vocab", "embed")))
    params = jax.tree.map(lambda _: placed, state)
    program = Program(
        "f", lambda params, x: function(nnx.merge(graphdef, params), x), (params, argument), 0
    )
    return ShardedPrograms(mesh, Jitted()).make(program)(params, argument)


def test_split_table_looks_up_every_token():
    table = np.random.default_rng(0).standard_normal((512, 8), np.float32)
    token_ids = jnp.asarray([0, 63, 64, 300, 511, 64], jnp.int32)
    found = split_table(table, lambda embed, ids: embed(ids), token_ids)
    np.testing.assert_array_equal(found, table[np.asarray(token_ids)])


def test_best_token_of_a_split_vocabulary_is_the_first_of_equals():
    rng = np.random.default_rng(0)
    table = rng.integers(-2, 3, (512, 4)).astype(np.float32)  # many equal logits
    hidden = jnp.asarray(rng.integers(-2, 3, (32, 4)), jnp.float32)
    best = split_table(table, lambda embed, x: embed.best_tokens(x), hidden)
    logits = np.asarray(hidden) @ table.T
    np.testing.assert_array_equal(best, logits.argmax(axis=1))
    gathered = split_table(table, lambda embed, x: embed.logits(x), hidden)
    np.testing.assert_array_equal(gathered, logits)
    np.testing.assert_array_equal(best, take_best(jnp.asarray(logits)))


# Programs


def collectives(program: Any) -> dict[str, int]:
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return dict(Counter(re.findall(rf" ({names})(?:-start)?\(", program.as_text())))


def test_programs_tell_each_other_no_more_than_they_must(params_of_eight):
    mesh, split = tensor_parallel_mesh(8), TensorParallel(CONFIG, 8)
    graphdef, _ = abstract_model(split.part, dtype="float32", split_by=split.rules)
    params = params_of_eight
    spec = KVCacheSpec(2, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE, "float32")
    cache = allocate_kv_cache(spec, NUM_BLOCKS, split.rules.named_sharding(mesh, KV_CACHE_AXES))
    store = ShardedPrograms(mesh, ExecutableStore(None))
    forward = compile_forward(store, graphdef, params, cache, LAYOUT, max_num_seqs=4)
    # Two for each of two layers, and one for the embedding.
    assert collectives(forward) == {"all-reduce": 2 * 2 + 1}
    part_bytes = NUM_BLOCKS * (spec.bytes_per_block // 8 + 4 * BLOCK_SIZE)
    assert forward.memory_analysis().alias_size_in_bytes == part_bytes
    assert re.findall(rf"= \w+\[{NUM_BLOCKS},[^ ]* copy", forward.as_text()) == []

    head, head_params = split_head(graphdef, params)
    greedy = compile_greedy(store, head, head_params, LAYOUT, max_num_seqs=4)
    assert collectives(greedy) == {"all-gather": 1}
    assert "s32[8,2,4]" in greedy.as_text()  # one pair of each device for each of four sequences
    sample = compile_sample(
        store, head, head_params, cache, LAYOUT, max_num_seqs=4, max_logprobs=20
    )
    # The logits; and once more in a branch, for log probabilities of a batch that changes them.
    assert collectives(sample) == {"all-gather": 2}
