"""The programs of a step, and exported ones, compiled for GPUs that are not here (`-m aot`)."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export

from paged.kv_cache import KVCache
from paged.models.artifact import Artifact
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, split_head
from paged.models.packing import BatchLayout
from paged.models.programs import Program
from paged.models.sharded_programs import ShardedPrograms
from paged.models.step import (
    compile_forward,
    compile_greedy,
    compile_resize,
    compile_sample,
)
from paged.models.tensor_parallel import TensorParallel
from paged.scheduler.config import EngineConfig
from paged.scheduler.exporting import compile_artifact
from paged.sharding import KV_CACHE_AXES
from tests.server.process import ROOT

pytestmark = pytest.mark.aot

TARGETS = ["a100", "h100", "h200", "b200"]


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    for name in ("triton", "jax_triton", "jax_cuda12_plugin"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"missing tool: {name}, of the extra `aot`")


# Two layers of an 8B model's shape, apart from its vocabulary.
MODEL = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=8192,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)
NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS = 2000, 16, 64
LAYER_BYTES = NUM_BLOCKS * 2 * 8 * BLOCK_SIZE * 128 * 2
LAYOUT = BatchLayout(64, 64, 512, max_logit_edits=8, vocab_size=MODEL.vocab_size)


class Deviceless:
    """A source whose programs are reports on what an absent GPU would run."""

    def __init__(self, target_name: str, num_devices: int = 1) -> None:
        from paged.gpu.aot import Target

        self.target = Target(target_name, {"tp": num_devices})

    def make(self, program: Program):
        def struct(leaf):
            sharding = getattr(leaf, "sharding", None)
            return self.target.struct(leaf.shape, leaf.dtype, *(sharding.spec if sharding else ()))

        arguments = jax.tree.map(struct, program.arguments)
        jitted = jax.jit(program.function, donate_argnums=program.donated)
        return self.target.compile(jitted, *arguments)


def abstract_cache() -> KVCache:
    layer = jax.ShapeDtypeStruct((NUM_BLOCKS, 2, 8, BLOCK_SIZE, 128), jnp.bfloat16)
    return KVCache((layer,) * 2, jax.ShapeDtypeStruct((NUM_BLOCKS, BLOCK_SIZE), jnp.int32))


@functools.cache
def model() -> tuple:
    return abstract_model(MODEL, dtype="bfloat16", attention_backend="triton")


@pytest.mark.parametrize("target_name", TARGETS)
def test_a_greedy_decode_step_is_two_graphs_and_copies_no_cache(target_name: str):
    source, (graphdef, params) = Deviceless(target_name), model()
    forward = compile_forward(
        source, graphdef, params, abstract_cache(), LAYOUT, max_num_seqs=NUM_ROWS
    )
    head, head_params = split_head(graphdef, params)
    greedy = compile_greedy(source, head, head_params, LAYOUT, max_num_seqs=NUM_ROWS)
    for report in (forward, greedy):
        assert report.operations == {"kCommandBuffer": 1}
        assert report.largest_copy_bytes < LAYER_BYTES // 100
    # Both layers and the token ids are updated where they are.
    assert forward.alias_bytes == 2 * LAYER_BYTES + NUM_BLOCKS * BLOCK_SIZE * 4
    assert forward.temp_bytes < LAYER_BYTES


def test_eight_gpus_tell_each_other_no_more_than_they_must():
    source, split = Deviceless("h200", 8), TensorParallel(MODEL, 8)
    mesh = source.target.mesh
    graphdef, _ = abstract_model(
        split.part, dtype="bfloat16", attention_backend="triton", split_by=split.rules
    )
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model()[1],
        split.param_shardings(mesh, dtype="bfloat16"),
    )
    heads = split.rules.named_sharding(mesh, KV_CACHE_AXES)
    cache = abstract_cache()
    layers = tuple(
        jax.ShapeDtypeStruct(layer.shape, layer.dtype, sharding=heads) for layer in cache.layers
    )
    cache = KVCache(layers, cache.token_ids)
    store = ShardedPrograms(mesh, source)
    forward = compile_forward(store, graphdef, params, cache, LAYOUT, max_num_seqs=NUM_ROWS)
    # Two for each of two layers, and one for the embedding.
    assert forward.collectives == {"all-reduce": 2 * 2 + 1}
    assert forward.alias_bytes == 2 * LAYER_BYTES // 8 + NUM_BLOCKS * BLOCK_SIZE * 4
    assert forward.largest_copy_bytes < LAYER_BYTES // 8 // 100
    assert {"attention_kernel"} <= {kernel.name for kernel in forward.kernels}
    whole_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert forward.argument_bytes < (whole_bytes + 2 * LAYER_BYTES) / 8 * 1.05

    head, head_params = split_head(graphdef, params)
    greedy = compile_greedy(store, head, head_params, LAYOUT, max_num_seqs=NUM_ROWS)
    assert greedy.collectives == {"all-gather": 1}
    sample = compile_sample(
        store, head, head_params, cache, LAYOUT, max_num_seqs=NUM_ROWS, max_logprobs=20
    )
    # The logits; and once more in a branch, for log probabilities of a batch that changes them.
    assert sample.collectives == {"all-gather": 2}


def test_what_keeps_the_sampler_out_of_one_graph():
    """docs/gpu_kernels.md says why; a step with it costs these dispatches more."""
    source, (graphdef, params) = Deviceless("h200"), model()
    head, head_params = split_head(graphdef, params)
    sample = compile_sample(
        source,
        head,
        head_params,
        abstract_cache(),
        LAYOUT,
        max_num_seqs=NUM_ROWS,
        max_logprobs=20,
    )
    assert sample.operations["kWhile"] == 2  # rows whose top-p lies deep, one at a time
    assert sample.operations["kConditional"] == 1  # log probabilities, if some row wants them
    assert sample.operations["kCommandBuffer"] == 2
    assert sum(sample.operations.values()) <= 11
    # Logits in float32 may be kept beside changed ones; nothing of the cache is.
    assert sample.largest_copy_bytes <= NUM_ROWS * MODEL.vocab_size * 4
    # Two small operations: XLA makes graphs of five and more.
    resize = compile_resize(source, head, head_params, LAYOUT, num_seqs=8)
    assert sum(resize.operations.values()) == 2


@pytest.fixture(scope="module")
def small_model(tmp_path_factory, data_dir: pathlib.Path) -> pathlib.Path:
    """A configuration whose head size the kernels have; there are no weights, as none are read."""
    folder = tmp_path_factory.mktemp("small")
    values = json.loads((data_dir / "golden/tiny/llama/config.json").read_text())
    values |= {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# In a process of its own, in which nothing can import Triton.
COMPILE_ARTIFACT = """
import json, sys
sys.modules["triton"] = sys.modules["jax_triton"] = None
from paged.models.artifact import Artifact, ArtifactPrograms
from paged.models.programs import Program
from tests.models.test_compiled_programs import Deviceless
import jax
from jax import export

artifact = Artifact.open(sys.argv[1])
(name,) = [name for name in artifact.programs if "forward BatchLayout(num_tokens=8" in name]
shapes = export.deserialize(bytearray(artifact.read(name))).in_avals
# As the engine passes them: the cache, two layers and token ids, lies before inputs and tokens.
arguments = tuple(shapes[:-5]), tuple(shapes[-5:-2]), *shapes[-2:]
program = Program(name, None, arguments, (0, 0, (0, 0, 0), 0), donated=(1,))
report = ArtifactPrograms(artifact, Deviceless("h200")).make(program)
print(json.dumps({
    "kernels": sorted(kernel.name for kernel in report.kernels),
    "operations": report.operations,
    "aliased": report.alias_bytes,
    "copied": report.largest_copy_bytes,
    "programs": len(artifact.programs),
    "settings": artifact.settings,
}))
"""


def test_artifact_for_an_absent_gpu_needs_no_triton(small_model, tmp_path):
    config = EngineConfig(
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        compilation_cache_dir=None,
    )
    compile_artifact(str(small_model), config, tmp_path, gpu="h200", progress=False)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE_ARTIFACT, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    settings = result["settings"]
    assert settings["device"] == "sm_90"
    assert settings["attention_backend"] == "triton"
    # Three quarters of the memory are JAX's, nearly all of that is for blocks of 8 KiB.
    num_blocks = settings["num_gpu_blocks_override"]
    assert 0.9 * 0.75 * 150.1e9 < num_blocks * 8192 < 0.75 * 150.1e9
    assert {"attention_kernel", "combine_kernel"} <= set(result["kernels"])
    assert result["operations"] == {"kCommandBuffer": 1}
    assert result["aliased"] == num_blocks * (8192 + 16 * 4)
    assert result["copied"] < 2**20
    # Steps of 8 and 64 tokens; greedy and sampler of 8 rows.
    assert result["programs"] == len(list(tmp_path.glob("*.stablehlo"))) == 5


def test_artifact_for_several_gpus_is_exported_for_all_of_them(small_model, tmp_path):
    config = EngineConfig(
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        tensor_parallel_size=2,
        compilation_cache_dir=None,
    )
    compile_artifact(str(small_model), config, tmp_path, gpu="h200", progress=False)
    artifact = Artifact.open(tmp_path)
    assert artifact.settings["tensor_parallel_size"] == 2
    # Each GPU has a copy of the one kv head: as many blocks as with one GPU, but for the weights.
    assert artifact.settings["num_gpu_blocks_override"] * 8192 > 0.9 * 0.75 * 150.1e9
    # One step of 8 tokens; greedy and sampler of 8 rows; scores.
    exported = [export.deserialize(bytearray(artifact.read(name))) for name in artifact.programs]
    assert [program.nr_devices for program in exported] == [2, 2, 2, 2]
