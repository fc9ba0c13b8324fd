"""Which weights become what, and the errors of checkpoints that are quantised wrongly."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.forward import abstract_model, param_shardings
from paged.models.quantization import QUANTIZATIONS, resolve_quantization
from paged.models.weights import SafetensorsSource, load_params
from paged.scheduler.config import QUANTIZATIONS as QUANTIZATIONS_OF_THE_ENGINE
from paged.sharding import ShardingRules, tensor_parallel_mesh

Q_PROJ = "model.layers.0.self_attn.q_proj"


def read_config(folder: Path, **changes: Any) -> ModelConfig:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= changes
    return ModelConfig.from_hf(raw)


def edited(folder: Path, tmp_path: Path, change) -> SafetensorsSource:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsSource(tmp_path)


def dtypes(params: nnx.State) -> dict[str, str]:
    flat = nnx.to_flat_state(params)
    return {".".join(map(str, path)): str(leaf.dtype) for path, leaf in flat}


@pytest.fixture
def gptq(data_dir: Path) -> Path:
    return data_dir / "golden/tiny/llama_gptq_asym"


def test_ignored_modules_and_the_head_stay_in_full(data_dir: Path, tmp_path: Path):
    folder = data_dir / "golden/tiny/llama_awq"

    def put_back(tensors):
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{Q_PROJ}.{part}"]
        tensors[f"{Q_PROJ}.weight"] = np.ones((128, 64), np.float16)

    config = read_config(folder, modules_to_not_convert=["layers.0.self_attn.q_proj"])
    params = load_params(
        config, edited(folder, tmp_path, put_back), dtype="bfloat16", progress=False
    )
    found = dtypes(params)
    assert found["layers.0.attention.q_proj.weight"] == "bfloat16"
    assert found["layers.0.attention.k_proj.weight.values"] == "uint8"
    assert found["lm_head.weight"] == found["embed.weight"] == "bfloat16"


def test_classic_config_means_the_same(data_dir: Path):
    folders = {
        path.parent for path in (data_dir / "golden/tiny").glob("llama_*/config_classic.json")
    }
    assert len(folders) >= 8
    for folder in sorted(folders):
        forms = [
            ModelConfig.from_hf(json.loads((folder / name).read_text())).quantization
            for name in ("config.json", "config_classic.json")
        ]
        assert forms[0] == forms[1]
        assert forms[0] is not None


@pytest.mark.parametrize("name", ["llama_gptq_asym", "llama_fp8_channel"])
def test_each_device_gets_its_slice(data_dir: Path, name: str):
    folder = data_dir / "golden/tiny" / name
    config = read_config(folder)
    _, abstract = abstract_model(config, dtype="bfloat16")
    shardings = param_shardings(abstract, ShardingRules(), tensor_parallel_mesh(2))
    whole, parts = (
        load_params(
            config, SafetensorsSource(folder), dtype="bfloat16", shardings=where, progress=False
        )
        for where in (None, shardings)
    )
    triples = zip(*map(jax.tree.leaves, (parts, whole, shardings)), strict=True)
    for leaf, expected, sharding in triples:
        assert leaf.sharding == sharding
        np.testing.assert_array_equal(leaf, expected)


def test_zero_biases_of_layers_without_a_bias_are_left_out(gptq: Path, tmp_path: Path):
    def add_bias(value: float):
        return edited(
            gptq, tmp_path, lambda t: t.update({f"{Q_PROJ}.bias": np.full(128, value, np.float16)})
        )

    config = read_config(gptq)
    params = load_params(config, add_bias(0), dtype="float32", progress=False)
    assert "layers.0.attention.q_proj.bias" not in dtypes(params)
    with pytest.raises(CheckpointError, match=rf"tensor {Q_PROJ}.bias is not zero"):
        load_params(config, add_bias(1), dtype="float32", progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.scales"), rf"missing: {Q_PROJ}.scales"),
        (lambda t: t.update({"x.qweight": np.ones(1, np.int32)}), "unexpected: x.qweight"),
        (
            lambda t: t.update({f"{Q_PROJ}.qweight": np.ones((4, 128), np.int32)}),
            rf"of another shape: {Q_PROJ}.qweight \[4, 128\] instead of \[8, 128\]",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.qzeros": np.ones((2, 16), np.float32)}),
            rf"tensor {Q_PROJ}.qzeros has element type float32; .* asks for int32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(gptq: Path, tmp_path: Path, change, message: str):
    with pytest.raises(CheckpointError, match=message):
        load_params(
            read_config(gptq), edited(gptq, tmp_path, change), dtype="float32", progress=False
        )


def test_experts_that_the_config_leaves_out_by_their_names_are_in_full(data_dir: Path):
    tiny = data_dir / "golden/tiny"
    raw = json.loads((tiny / "qwen3_moe/config.json").read_text())
    quantized = json.loads((tiny / "llama_awq/config.json").read_text())["quantization_config"]
    quantized |= {"modules_to_not_convert": ["experts.0."]}
    config = ModelConfig.from_hf(raw | {"quantization_config": quantized})
    _, abstract = abstract_model(config, dtype="float32")
    found = dtypes(abstract)
    assert found["layers.0.attention.k_proj.weight.values"] == "uint8"
    assert found["layers.0.mlp.experts.up_proj.weight"] == "float32"


def test_scales_of_keys_and_values_are_passed_over_aloud(data_dir: Path, tmp_path: Path, caplog):
    folder = data_dir / "golden/tiny/llama_w4a16"
    name = "model.layers.1.self_attn.k_scale"
    source = edited(folder, tmp_path, lambda t: t.update({name: np.ones(1, np.float32)}))
    load_params(read_config(folder), source, dtype="float32", progress=False)
    assert f"1 tensors with scales of keys and values, such as {name}, are not used" in caplog.text


def test_groups_that_do_not_divide_a_layer_are_refused(gptq: Path):
    config = read_config(gptq, group_size=96)
    with pytest.raises(UnsupportedModelError, match=r"k_proj cannot be quantised .*: 64 inp"):
        abstract_model(config, dtype="float32")


def test_names_of_the_command_line_are_those_of_the_formats():
    assert set(QUANTIZATIONS_OF_THE_ENGINE) == set(QUANTIZATIONS)


@pytest.mark.parametrize(
    ("requested", "checkpoint", "resolved"),
    [
        (None, None, None),
        (None, "awq", "awq"),
        ("awq", "awq", "awq"),
        ("fp8", "fp8", "fp8"),
        ("fp8", None, "fp8"),
        ("int4", None, "int4"),
    ],
)
def test_flag_and_checkpoint_agree(requested, checkpoint, resolved):
    assert resolve_quantization(requested, checkpoint) == resolved


@pytest.mark.parametrize(
    ("requested", "checkpoint", "message"),
    [
        ("int8", "awq", "quantization='int8' contradicts the checkpoint, .* by 'awq' already"),
        ("fp8", "compressed-tensors", "quantization='fp8' contradicts the checkpoint"),
        ("gptq", None, "quantization='gptq' needs a checkpoint that is quantised so"),
    ],
)
def test_flag_that_contradicts_the_checkpoint_is_refused(requested, checkpoint, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_quantization(requested, checkpoint)


@pytest.mark.parametrize(
    ("quantization", "linear", "head"),
    [("int8", "int8", "int8"), ("int4", "uint8", "int8"), ("fp8", "float8_e4m3fn", "bfloat16")],
)
def test_weights_in_full_are_made_smaller_while_they_are_loaded(
    data_dir: Path, quantization: str, linear: str, head: str
):
    folder = data_dir / "golden/tiny/llama"
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    source = SafetensorsSource(folder)
    params = load_params(
        config, source, dtype="bfloat16", quantization=quantization, progress=False
    )
    _, abstract = abstract_model(config, dtype="bfloat16", quantization=quantization)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )
    found = dtypes(params)
    assert found["layers.1.mlp.up_proj.weight.values"] == linear
    assert found.get("lm_head.weight.values", found.get("lm_head.weight")) == head
    assert found["embed.weight"] == found["norm.weight"] == "bfloat16"
    # What is stored stands for the weight, within half a step.
    original = source.read("model.layers.1.mlp.up_proj.weight")
    model = nnx.merge(
        abstract_model(config, dtype="bfloat16", quantization=quantization)[0], params
    )
    stored = model.layers[1].mlp.up_proj.weight
    widened = np.asarray(stored.rows(jnp.arange(128), 64, jnp.dtype("float32")))
    # Half a step of 255, 15 and, of e4m3 beside its largest, 14.
    steps = {"int8": 254, "int4": 14, "fp8": 28}[quantization]
    span = np.abs(original).max(axis=1, keepdims=True) * (2 if quantization == "int4" else 1)
    assert (np.abs(widened - original) <= span / steps + 2**-8 * np.abs(original)).all()
