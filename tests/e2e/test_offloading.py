"""Blocks below the device, from settings to a real engine and across restarts."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged.models.fingerprint import weights_fingerprint
from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams

PROMPTS = [[3 + (7 * i + 5 * k) % 250 for k in range(120)] for i in range(10)]


@pytest.fixture
def config(tiny_config: EngineConfig, tmp_path: Path) -> EngineConfig:
    # 64 usable blocks of 8 tokens: four of the prompts. Host memory holds one prompt more.
    return dataclasses.replace(
        tiny_config,
        kv_offloading_size=0.0002,
        kv_offloading_path=str(tmp_path / "kv"),
    )


def serve(engine: Engine, prompts) -> tuple[list[list[int]], dict[str, int]]:
    """Serve one prompt after the other; return the outputs and where cached tokens came from."""
    outputs: list[list[int]] = []
    found = {"device": 0, "host": 0, "disk": 0}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=4))
        outputs.append([])
        while engine.has_unfinished:
            deltas, stats = engine.step()
            found["device"] += stats.prefix_hits
            for medium, num_tokens in stats.external_prefix_hits.items():
                found[medium] += num_tokens
            for delta in deltas:
                outputs[-1] += delta.outputs[0].token_ids
    return outputs, found


def test_second_pass_comes_from_below_and_a_restart_finds_the_disk(tiny_model, config):
    engine = load_engine(str(tiny_model), config, progress=False).engine
    expected, found = serve(engine, PROMPTS)
    assert found == {"device": 0, "host": 0, "disk": 0}
    # Backwards: first what the device still has, then what went to the host last, then the disk.
    outputs, found = serve(engine, PROMPTS[::-1])
    assert outputs == expected[::-1]
    # Fourteen full blocks of each prompt, wherever they were.
    assert sum(found.values()) == len(PROMPTS) * 14 * 8
    assert found["host"] > 0
    assert found["disk"] > 0
    engine._tiers.flush()
    engine.close()

    engine = load_engine(str(tiny_model), config, progress=False).engine
    engine._tiers.flush()  # the folder has been read
    outputs, found = serve(engine, PROMPTS[:3])
    assert outputs == expected[:3]
    assert found["disk"] > 0
    assert found["device"] == 0
    engine.close()


def test_blocks_of_other_weights_are_not_found(tiny_model, config, tmp_path):
    engine = load_engine(str(tiny_model), config, progress=False).engine
    serve(engine, PROMPTS)
    engine._tiers.flush()
    engine.close()

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    file = next(other.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name] * np.asarray(1.5, tensors[name].dtype)
    save_file(tensors, file)
    engine = load_engine(str(other), config, progress=False).engine
    engine._tiers.flush()
    _, found = serve(engine, PROMPTS)
    assert found["disk"] == 0
    engine.close()


def test_reset_and_new_weights_reach_below_the_device(tiny_model, config):
    engine = load_engine(str(tiny_model), config, progress=False).engine
    serve(engine, PROMPTS)
    assert engine.reset_prefix_cache()
    _, found = serve(engine, PROMPTS)
    assert found == {"device": 0, "host": 0, "disk": 0}
    engine.advance_weights_epoch()
    _, found = serve(engine, PROMPTS)
    assert found == {"device": 0, "host": 0, "disk": 0}
    engine.close()


def test_unusable_folder_is_refused_before_the_weights_are_loaded(tiny_model, config, tmp_path):
    (tmp_path / "file").write_text("")
    broken = dataclasses.replace(config, kv_offloading_path=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be written"):
        load_engine(str(tiny_model), broken, progress=False)


def test_fingerprint_tells_values_shapes_and_types_apart():
    def of(values):
        return weights_fingerprint({"w": np.asarray(values)})

    base = np.arange(1000, dtype=np.float32)
    changed = base * 1.0001
    prints = {of(base), of(changed), of(base.reshape(10, 100)), of(base.astype(np.float64))}
    assert len(prints) == 4
    assert of(base) == of(base.copy())
