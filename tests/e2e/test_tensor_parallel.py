"""Engines on several devices: the tokens of one, and what they can do beside."""

import dataclasses
import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged.models.checkpoint import open_checkpoint
from paged.models.config import ModelConfig
from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.exporting import compile_artifact
from paged.scheduler.loading import LoadedEngine, load_engine
from paged.scheduler.params import SamplingParams
from paged.scheduler.placement import Placement, split_of
from paged.scheduler.resolution import resolve_config
from tests.models.test_weights import hf_shapes

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "random": SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
    "edited": SamplingParams(
        temperature=0, repetition_penalty=1.3, logprobs=2, max_tokens=6, ignore_eos=True
    ),
    "scored": SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=1, ignore_eos=True),
    "two": SamplingParams(temperature=1, n=2, seed=5, max_tokens=6, ignore_eos=True),
}


@pytest.fixture(scope="module")
def config(tiny_config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(
        tiny_config,
        attention_backend="xla",
        linear_backend="xla",
        max_num_seqs=8,
        max_num_batched_tokens=8,  # one shape of a step
        compilation_cache_dir=None,
    )


@pytest.fixture(scope="module")
def wide_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 16 query heads and 8 kv heads."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in hf_shapes(ModelConfig.from_hf(values)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def generate(engine: Engine) -> dict[str, list]:
    """Return the tokens of each sample of each request, and what else they bring."""
    found: dict[str, list] = {}
    for name, params in PARAMS.items():
        engine.add_request(name, list(range(40, 75)), params)
    while engine.has_unfinished:
        for output in engine.step()[0]:
            for sample in output.outputs:
                key = f"{output.request_id} {sample.index}"
                found.setdefault(key, []).extend(sample.token_ids)
            if output.finished and output.prompt_logprobs is not None:
                # The first token has none; of the others, what is likeliest, and their ranks.
                found[f"{output.request_id} prompt"] = [
                    [(token_id, scored.rank) for token_id, scored in position.items()]
                    for position in output.prompt_logprobs[1:]
                ]
    return found


def load(model: Path, config: EngineConfig, **changes) -> LoadedEngine:
    return load_engine(str(model), dataclasses.replace(config, **changes), progress=False)


def generate_on(model: Path, config: EngineConfig, **changes) -> dict[str, list]:
    engine = load(model, config, **changes).engine
    found = generate(engine)
    engine.close()
    return found


@pytest.fixture(scope="module")
def expected(tiny_model, config) -> dict[str, list]:
    """What one device generates."""
    return generate_on(tiny_model, config)


def bytes_by_device(arrays) -> set[int]:
    held: Counter[jax.Device] = Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return set(held.values())


def test_eight_devices_generate_what_one_does_with_an_eighth_each(wide_model, config):
    loaded = {size: load(wide_model, config, tensor_parallel_size=size) for size in (1, 8)}
    found = {size: generate(one.engine) for size, one in loaded.items()}
    assert len(found[1]) == 7
    assert len(found[1]["scored prompt"]) == 34
    assert found[8] == found[1]
    held = {}
    for size, one in loaded.items():
        runner = one.engine.runner
        norms = sum(leaf.nbytes for leaf in runner._leaves if leaf.ndim == 1)
        (params,) = bytes_by_device(runner._leaves)
        (cache,) = bytes_by_device(runner._kv_cache.layers)
        held[size] = params - norms, cache
        one.engine.close()
    assert held[1] == (8 * held[8][0], 8 * held[8][1])
    assert loaded[8].cache_info["tensor_parallel_size"] == "8"


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of tests that share the programs of two devices."""
    cache = tmp_path_factory.mktemp("two")
    return {"compilation_cache_dir": str(cache), "tensor_parallel_size": 2}


def test_a_second_start_on_two_devices_loads_its_programs(
    tiny_model, config, expected, two_devices
):
    for _ in range(2):
        assert generate_on(tiny_model, config, **two_devices) == expected
        folder = Path(two_devices["compilation_cache_dir"], "executables")
        files = {file for file in folder.rglob("*") if file.is_file()}
        assert len(files) == 4  # a step of 8 tokens, greedy, sampler, scores


@pytest.mark.slow
def test_exported_programs_serve_two_devices(tiny_model, config, expected, tmp_path):
    compile_artifact(
        str(tiny_model),
        dataclasses.replace(config, tensor_parallel_size=2),
        tmp_path / "artifact",
        progress=False,
    )
    opened = {"artifact": str(tmp_path / "artifact"), "tensor_parallel_size": 2}
    assert generate_on(tiny_model, config, **opened) == expected
    with pytest.raises(ValueError, match="was made for tensor_parallel_size=2, but here it is 1"):
        load(tiny_model, config, artifact=opened["artifact"])


def test_blocks_of_two_devices_go_below_them_and_come_back(
    tiny_model, config, two_devices, tmp_path
):
    # 64 usable blocks of 8 tokens: four of the prompts. Host memory holds one prompt more.
    prompts = [[3 + (7 * i + 5 * k) % 250 for k in range(120)] for i in range(8)]
    below = {"kv_offloading_size": 0.0002, "kv_offloading_path": str(tmp_path)}
    engine = load(tiny_model, config, **two_devices, **below).engine
    outputs, num_found = [], 0
    for number, prompt in enumerate([*prompts, *prompts[::-1]]):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=4))
        outputs.append([])
        while engine.has_unfinished:
            deltas, stats = engine.step()
            num_found += sum(stats.external_prefix_hits.values())
            for delta in deltas:
                outputs[-1] += delta.outputs[0].token_ids
    engine.close()
    assert outputs[8:] == outputs[:8][::-1]
    assert num_found > 3 * 14 * 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "num_q_heads=4 is no multiple of it.*do: 1, 2, 4"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel .* has no experts"),
        (
            {"tensor_parallel_size": 2, "linear_backend": "native"},
            "linear_backend='native' serves one device, but tensor_parallel_size=2; use 'xla'",
        ),
        (
            {"tensor_parallel_size": 2, "attention_backend": "native"},
            "attention_backend='native' serves one device, but tensor_parallel_size=2",
        ),
    ],
)
def test_what_several_devices_cannot_do_is_refused(tiny_model, config, settings, message):
    with pytest.raises(ValueError, match=message):
        load(tiny_model, config, **settings)


@pytest.mark.slow
def test_experts_on_two_devices_generate_what_those_on_one_do(
    tiny_model, data_dir, config, tmp_path
):
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    shutil.copytree(data_dir / "golden/tiny/mixtral", tmp_path, dirs_exist_ok=True)
    expected = generate_on(tmp_path, config)
    for is_by_expert in (False, True):
        split = {"tensor_parallel_size": 2, "enable_expert_parallel": is_by_expert}
        assert generate_on(tmp_path, config, **split) == expected


def test_experts_on_one_device_are_not_parallel(data_dir, config):
    model = open_checkpoint(str(data_dir / "golden/tiny/mixtral")).model_config
    with pytest.raises(ValueError, match=r"but tensor_parallel_size=1; raise it"):
        split_of(dataclasses.replace(config, enable_expert_parallel=True), model)
    settings = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    part = split_of(dataclasses.replace(config, **settings), model).part.experts
    assert (part.num_experts_here, part.num_experts) == (2, 4)


def test_more_devices_than_there_are_say_how_to_get_some(wide_model, config):
    with pytest.raises(
        ValueError, match=r"num_devices=16 .*XLA_FLAGS=--xla_force_host_platform_device_count=16"
    ):
        load(wide_model, config, tensor_parallel_size=16)


def test_a_start_names_the_mesh_and_why_it_has_no_native_kernels(tiny_model, config, caplog):
    automatic = {"attention_backend": "auto", "linear_backend": "auto", "tensor_parallel_size": 4}
    model = open_checkpoint(str(tiny_model)).model_config
    with caplog.at_level(logging.INFO, "paged"):
        resolved = resolve_config(dataclasses.replace(config, **automatic), model)
        Placement.of(resolved, model)
    assert (resolved.attention_backend, resolved.linear_backend) == ("xla", "xla")
    text = caplog.text
    assert "Tensor parallelism over 4 devices (cpu), mesh {'tp': 4}" in text
    assert "each has 1 of 4 query heads and 1 of 2 kv heads" in text
    assert "the native CPU kernels serve one device, and tensor_parallel_size=4" in text
