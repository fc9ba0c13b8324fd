"""`paged compile` and what an engine makes of its folder, on a CPU."""

import dataclasses
import json
from pathlib import Path

import pytest

from paged.models.artifact import MANIFEST
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import CapacityError
from paged.scheduler.exporting import compile_artifact
from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams
from paged.server.cli import main

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "random": SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, logprobs=2, max_tokens=4, ignore_eos=True),
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
def artifact(tiny_model: Path, config: EngineConfig, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    compile_artifact(str(tiny_model), config, folder, progress=False)
    return folder


def generate(model: Path, config: EngineConfig) -> dict[str, list]:
    engine = load_engine(str(model), config, progress=False).engine
    for name, params in PARAMS.items():
        engine.add_request(name, list(range(40, 75)), params)
    tokens: dict[str, list] = {name: [] for name in PARAMS}
    while engine.has_unfinished:
        for output in engine.step()[0]:
            tokens[output.request_id] += output.outputs[0].token_ids
    engine.close()
    return tokens


def test_exported_programs_give_the_same_tokens(tiny_model, config, artifact, tmp_path):
    expected = generate(tiny_model, config)
    opened = EngineConfig(
        artifact=str(artifact),
        block_size=config.block_size,
        compilation_cache_dir=str(tmp_path),
        async_scheduling=True,
    )
    assert generate(tiny_model, opened) == expected
    # XLA's results are kept: the exported programs are not even read again.
    hidden = artifact.with_name("hidden")
    hidden.mkdir()
    (hidden / MANIFEST).write_text((artifact / MANIFEST).read_text())
    assert generate(tiny_model, dataclasses.replace(opened, artifact=str(hidden))) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 16}, "was made for block_size=8, but here it is 16"),
        ({"max_num_seqs": 4}, "was made for max_num_seqs=8, but here it is 4"),
        ({"dtype": "bfloat16"}, "was made for dtype='float32', but here it is 'bfloat16'"),
        ({"quantization": "int8"}, "was made for quantization=None, but here it is 'int8'"),
        ({"kv_cache_memory_bytes": 9999}, "kv_cache_memory_bytes contradicts artifact"),
    ],
)
def test_settings_that_disagree_are_named(tiny_model, config, artifact, change, message):
    wanted = dataclasses.replace(config, artifact=str(artifact), **change)
    with pytest.raises(ValueError, match=message):
        load_engine(str(tiny_model), wanted, progress=False)


def edit(artifact: Path, folder: Path, change) -> Path:
    """Return a copy of an artifact's manifest, changed."""
    content = json.loads((artifact / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax", "0.4.1"),
        ("paged", "0.0.1"),
        ("device", "sm_90"),
        ("model.hidden_size", 7),
        ("model.rope_theta", 5.0),
    ],
)
def test_versions_device_and_model_must_agree(tiny_model, config, artifact, tmp_path, name, value):
    folder = edit(artifact, tmp_path, lambda content: content["settings"].update({name: value}))
    wanted = dataclasses.replace(config, artifact=str(folder))
    with pytest.raises(ValueError, match=rf"was made for {name}={value!r}, but here it is"):
        load_engine(str(tiny_model), wanted, progress=False)


def test_damage_is_found_before_a_program_is_used(tiny_model, config, artifact, tmp_path):
    wanted = dataclasses.replace(config, artifact=str(tmp_path))
    with pytest.raises(ValueError, match=r"is no artifact: there is no manifest.json in it"):
        load_engine(str(tiny_model), wanted, progress=False)
    edit(artifact, tmp_path, lambda content: content.update(format=0))
    with pytest.raises(ValueError, match="has format 0, this version reads 2"):
        load_engine(str(tiny_model), wanted, progress=False)
    edit(artifact, tmp_path, lambda content: content["programs"].clear())
    # Several are looked for at once; which one is missed first is a matter of time.
    with pytest.raises(ValueError, match="has no program '"):
        load_engine(str(tiny_model), wanted, progress=False)
    edit(artifact, tmp_path, lambda content: None)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_engine(str(tiny_model), wanted, progress=False)
    for file in artifact.glob("*.stablehlo"):
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"\.stablehlo is damaged; run `paged compile` again"):
        load_engine(str(tiny_model), wanted, progress=False)


def test_blocks_that_do_not_fit_are_refused(tiny_model, config, artifact, tmp_path):
    many = 10**12

    def enlarge(content):
        content["settings"]["num_gpu_blocks_override"] = many

    folder = edit(artifact, tmp_path, enlarge)
    wanted = dataclasses.replace(config, artifact=str(folder), num_gpu_blocks_override=many)
    with pytest.raises(CapacityError, match="was made for 1000000000000 KV blocks"):
        load_engine(str(tiny_model), wanted, progress=False)


def test_command_line_refuses_what_cannot_be_compiled_ahead(
    tiny_model, tmp_path, capsys, monkeypatch
):
    # The command sets these; put back afterwards.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    command = ["compile", str(tiny_model), "--out", str(tmp_path / "new")]
    for options, message in (
        (["--attention-backend", "native"], "cannot be compiled ahead"),
        (["--gpu", "v100"], "target 'v100' is unknown"),
        (["--artifact", "x"], "--out names a new one"),
    ):
        assert main([*command, *options]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["compile", str(tiny_model), "--out", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
