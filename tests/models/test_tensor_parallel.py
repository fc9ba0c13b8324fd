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


def test_rules_that_do_not_cut_into_parts_are_refused():
    rules = ShardingRules(mlp=None)
    with pytest.raises(
        ValueError, match=r"parameter layers\.0\.mlp\.\w+\.\w+ of shape .* is cut to .* by 2 dev"
    ):
        TensorParallel(CONFIG, 2, rules).param_shardings(tensor_parallel_mesh(2), dtype="float32")


# Parameters


def test_each_device_holds_its_share_of_the_parameters():
    mesh, split = tensor_parallel_mesh(8), TensorParallel(CONFIG, 8)
    params = init_random_params(
        CONFIG, dtype="float32", shardings=split.param_shardings(mesh, dtype="float32")
    )
    leaves = jax.tree.leaves(params)
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


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_eight_devices_give_the_logits_of_one(quantization: str | None):
    source, dtype = RandomSource(hf_shapes(CONFIG)), "float32"
    mesh, split = tensor_parallel_mesh(8), TensorParallel(CONFIG, 8)
    prompts, chunk_sizes = {0: list(range(20)), 1: list(range(40, 47))}, {0: 6, 1: 3}
    logits = []
    for devices in (None, mesh):
        shardings = None
        if devices is not None:
            shardings = split.param_shardings(mesh, dtype=dtype, quantization=quantization)
        params = load_params(
            CONFIG,
            source,
            dtype=dtype,
            quantization=quantization,
            shardings=shardings,
            progress=False,
        )
        model = PagedModel(CONFIG, params, dtype=dtype, quantization=quantization, mesh=devices)
        logits.append(prefill_in_chunks(model, prompts, chunk_sizes))
    for i in prompts:
        # The devices' partial sums are added in another order.
        np.testing.assert_allclose(logits[1][i], logits[0][i], atol=2e-4, rtol=1e-4)


def test_axis_of_the_mesh_may_have_another_name():
    axes = {"vocab": "x", "q_heads": "x", "kv_heads": "x", "mlp": "x"}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = ShardingRules(**axes)
    shardings = TensorParallel(CONFIG, 2, rules).param_shardings(mesh, dtype="float32")
    params = init_random_params(CONFIG, dtype="float32")
    alone = PagedModel(CONFIG, params, dtype="float32")
    split = PagedModel(
        CONFIG, jax.device_put(params, shardings), dtype="float32", mesh=mesh, rules=rules
    )
    expected = alone.logits({0: range(20)})[0]
    np.testing.assert_allclose(split.logits({0: range(20)})[0], expected, atol=2e-4, rtol=1e-4)


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


def test_programs_tell_each_other_no_more_than_they_must():
    mesh, split = tensor_parallel_mesh(8), TensorParallel(CONFIG, 8)
    graphdef, _ = abstract_model(split.part, dtype="float32", split_by=split.rules)
    shardings = split.param_shardings(mesh, dtype="float32")
    params = init_random_params(CONFIG, dtype="float32", shardings=shardings)
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
