"""A model with latent attention through the engine: chunks, preemption, prefixes, two devices."""

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.loading import LoadedEngine, load_engine
from paged.scheduler.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def golden(data_dir: Path) -> list[dict]:
    path = data_dir / "golden/tiny/deepseek_v3/expected.json"
    return json.loads(path.read_text())["cases"]


@pytest.fixture(scope="module")
def model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    for source in ("deepseek_v3", "tokenizer"):
        shutil.copytree(data_dir / "golden" / "tiny" / source, folder, dirs_exist_ok=True)
    return folder


def load(model: Path, config: EngineConfig, **changes) -> LoadedEngine:
    return load_engine(str(model), dataclasses.replace(config, **changes), progress=False)


def run(engine: Engine, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], Counter]:
    """Return the tokens of each prompt, and how often what happened to them."""
    found: dict[str, list[int]] = {name: [] for name in prompts}
    counts: Counter[str] = Counter()
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    while engine.has_unfinished:
        deltas, stats = engine.step()
        counts["preempted"] += stats.num_preempted
        counts["cached"] += stats.prefix_hits
        counts["restored"] += sum(stats.external_prefix_hits.values())
        for delta in deltas:
            found[delta.request_id] += delta.outputs[0].token_ids
    return found, counts


def test_tokens_equal_the_golden_in_chunks_from_caches_and_after_preemption(
    model: Path, golden: list[dict], tiny_config: EngineConfig
):
    # 11 usable blocks of 8 tokens; the longer prompt takes 7 of them in the end.
    small = {"max_model_len": 64, "num_gpu_blocks_override": 12}
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    engine = load(model, tiny_config, **small, **few, kv_offloading_size=0.001).engine
    held = [layer.shape for layer in engine.runner._kv_cache.layers]
    assert held == [(12, 1, 1, 8, 32 + 8)] * 2  # one vector per token and layer
    expected = {str(i): case["greedy_ids"] for i, case in enumerate(golden)}
    prompts = {str(i): case["prompt_ids"] for i, case in enumerate(golden)}
    assert run(engine, prompts)[0] == expected
    again, counts = run(engine, prompts)
    assert again == expected
    assert counts["cached"] >= 32
    others = {f"other {i}": [3 + (7 * i + 5 * k) % 250 for k in range(30)] for i in range(4)}
    crowded, counts = run(engine, others | prompts)
    assert counts["preempted"] > 0
    assert {name: crowded[name] for name in prompts} == expected
    alone = {}
    for name, prompt in others.items():
        alone |= run(engine, {name: prompt})[0]
    assert {name: crowded[name] for name in others} == alone
    # What the device has lost is in host memory: bit for bit, or tokens would differ.
    again, counts = run(engine, prompts)
    assert again == expected
    assert counts["restored"] >= 32
    engine.close()


@pytest.mark.slow
def test_two_devices_generate_the_golden_each_with_the_whole_cache(
    model: Path, golden: list[dict], tiny_config: EngineConfig
):
    split = {"attention_backend": "xla", "linear_backend": "xla", "tensor_parallel_size": 2}
    two_shapes = {"max_num_batched_tokens": 16, "compilation_cache_dir": None}
    engine = load(model, tiny_config, **two_shapes, **split).engine
    prompts = {str(i): case["prompt_ids"] for i, case in enumerate(golden)}
    found, _ = run(engine, prompts)
    held = engine.runner._kv_cache.layers[0].addressable_shards[0].data.shape
    engine.close()
    assert found == {str(i): case["greedy_ids"] for i, case in enumerate(golden)}
    assert held == (65, 1, 1, 8, 40)
