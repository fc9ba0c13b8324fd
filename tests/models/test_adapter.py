"""Files of LoRA adapters: what is read out of them, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paged.models.adapter import read_adapter
from paged.models.adapter_config import AdapterConfig
from paged.models.config import ModelConfig
from paged.models.errors import (
    AdapterMismatchError,
    AdapterNotFoundError,
    UnsupportedAdapterError,
)
from paged.models.lora_layers import AdaptableModel
from tests.lora_files import PREFIX, linear_shapes, write_adapter, write_files

Q_PROJ = "model.layers.0.self_attn.q_proj"


def adaptable(data_dir: Path, name: str, target_modules=None) -> AdaptableModel:
    folder = data_dir / "golden" / "tiny" / name
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return AdaptableModel.of(config, target_modules)


@pytest.fixture(scope="module")
def llama(data_dir: Path) -> AdaptableModel:
    return adaptable(data_dir, "llama")


def read(folder: Path, model: AdaptableModel, max_rank: int = 16):
    return read_adapter(str(folder), model, max_rank=max_rank, dtype="float32")


def small(tmp_path: Path, llama: AdaptableModel, **fields: Any) -> Path:
    """An adapter of one layer, whose config has these fields besides."""
    layer = next(layer for layer in llama.layers if layer.module == Q_PROJ)
    return write_adapter(tmp_path / "a", {Q_PROJ: (layer.num_outputs, layer.num_inputs)}, **fields)


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2", "gemma3_text", "olmo2"])
def test_layers_are_those_of_the_checkpoint(data_dir, name):
    shapes = linear_shapes(data_dir / "golden" / "tiny" / name)
    modules = adaptable(data_dir, name).by_module()
    assert {
        module: (sum(layer.num_outputs for layer in layers), layers[0].num_inputs)
        for module, layers in modules.items()
    } == shapes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_of_a_mixture_only_attention_may_change(data_dir, name):
    kinds = {layer.kind for layer in adaptable(data_dir, name).layers}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_outputs_of_a_fused_module_are_in_the_order_of_the_checkpoint(data_dir):
    layers = adaptable(data_dir, "phi3").by_module()["model.layers.1.self_attn.qkv_proj"]
    by_start = sorted(layers, key=lambda layer: layer.start)
    assert [layer.path.rsplit(".", 1)[-1] for layer in by_start] == ["q_proj", "k_proj", "v_proj"]
    assert [layer.start for layer in by_start] == [0, 64, 96]


def test_target_modules_leave_out_the_others(data_dir):
    model = adaptable(data_dir, "llama", ["q_proj", "v_proj"])
    assert {layer.kind for layer in model.layers} == {"q_proj", "v_proj"}
    with pytest.raises(UnsupportedAdapterError, match=r"down_proj.* may change q_proj, v_proj"):
        read(data_dir / "golden" / "tiny" / "llama_lora", model)
    with pytest.raises(ValueError, match="lora_target_modules names wq, but the linear layers of"):
        adaptable(data_dir, "llama", ["q_proj", "wq"])


def test_factor_is_in_b_and_digests_tell_contents_apart(data_dir, llama, tmp_path):
    tensors = load_file(data_dir / "golden/tiny/llama_lora_rs" / "adapter_model.safetensors")
    config = json.loads((data_dir / "golden/tiny/llama_lora_rs/adapter_config.json").read_text())
    plain = read(write_files(tmp_path / "plain", config | {"use_rslora": False}, tensors), llama)
    stabilised = read(data_dir / "golden" / "tiny" / "llama_lora_rs", llama)
    b = tensors[f"{PREFIX}{Q_PROJ}.lora_B.weight"]
    layer = plain.layers["layers.0.attention.q_proj"]
    np.testing.assert_allclose(layer.b.reshape(4, -1), 8 / 4 * b.T, rtol=1e-6)
    layer = stabilised.layers["layers.0.attention.q_proj"]
    np.testing.assert_allclose(layer.b.reshape(4, -1), 8 / 2 * b.T, rtol=1e-6)
    assert plain.digest != stabilised.digest
    again = read(write_files(tmp_path / "again", config, tensors), llama)
    assert again.digest == stabilised.digest


def test_patterns_give_modules_ranks_and_factors_of_their_own():
    config = AdapterConfig.from_json(
        {
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.up_proj": 4, r"layers\.3\..*": 1},
            "alpha_pattern": {"self_attn.q_proj": 6},
        }
    )
    ranks = {
        "model.layers.0.self_attn.q_proj": (2, 3.0),
        "model.layers.1.mlp.up_proj": (4, 4.0),
        "model.layers.11.mlp.up_proj": (8, 2.0),
        "model.layers.3.mlp.up_proj": (1, 16.0),
        "model.layers.0.my_q_proj": (8, 2.0),
    }
    for module, (rank, factor) in ranks.items():
        assert (config.rank_of(module), config.factor_of(module)) == (rank, factor), module


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora=True .DoRA.* is not implemented. Merge it"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*whole modules of its own .lm_head"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not implemented, only LORA is"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_name(tmp_path, llama, fields, message):
    with pytest.raises(UnsupportedAdapterError, match=message):
        read(small(tmp_path, llama, **fields), llama)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_leave_the_base_weights_alone_are_read(tmp_path, llama, init):
    assert read(small(tmp_path, llama, init_lora_weights=init), llama).layers


def test_heads_that_classify_are_left_out(tmp_path, llama):
    folder = small(tmp_path, llama, modules_to_save=["score"])
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    digest = read(folder, llama).digest
    tensors[f"{PREFIX}score.weight"] = np.ones((2, 64))
    assert read(write_files(tmp_path / "head", config, tensors), llama).digest == digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r .or rank_pattern.=0 must be a positive integer"),
        ({"rank_pattern": {"q_proj": True}}, "r .or rank_pattern.=True must be a positive integer"),
        ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern=.*must be an object whose keys are"),
        ({"lora_alpha": None}, "lora_alpha .or alpha_pattern.=None must be a number"),
        ({"alpha_pattern": []}, None),
    ],
)
def test_damaged_configs_are_refused(fields, message):
    config = {"r": 8, "lora_alpha": 16} | fields
    if message is None:
        assert AdapterConfig.from_json(config).alpha == 16
        return
    with pytest.raises(AdapterNotFoundError, match=message):
        AdapterConfig.from_json(config)


def test_rank_must_have_room(tmp_path, llama):
    folder = small(tmp_path, llama, rank=16)
    with pytest.raises(UnsupportedAdapterError, match=r"rank 16 at .*q_proj, more than max_lora"):
        read(folder, llama, max_rank=8)
    assert read(folder, llama, max_rank=16).layers


@pytest.mark.parametrize(
    ("name", "module", "shape"),
    [
        ("llama", "model.embed_tokens", (256, 64)),
        ("llama", "lm_head", (256, 64)),
        ("mixtral", "model.layers.0.block_sparse_moe.gate", (4, 64)),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1", (64, 64)),
        ("qwen3_moe", "model.layers.0.mlp.experts.7.down_proj", (64, 64)),
    ],
)
def test_other_weights_of_the_model_are_refused_by_their_names(
    data_dir, tmp_path, name, module, shape
):
    folder = write_adapter(tmp_path, {module: shape})
    message = f"changes {module}; here adapters may change "
    with pytest.raises(UnsupportedAdapterError, match=message):
        read(folder, adaptable(data_dir, name))


def test_adapters_of_other_models_are_refused(data_dir, tmp_path, llama):
    fused = write_adapter(tmp_path / "fused", {"model.layers.0.self_attn.qkv_proj": (128, 64)})
    with pytest.raises(AdapterMismatchError, match=r"it changes .*qkv_proj, which LlamaFor"):
        read(fused, llama)
    deeper = write_adapter(
        tmp_path / "deep", {f"model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(8)}
    )
    message = r"layers\.2\..*layers\.4\.self_attn.q_proj and 3 more, which"
    with pytest.raises(AdapterMismatchError, match=message):
        read(deeper, llama)
    wide = write_adapter(tmp_path / "wide", {Q_PROJ: (256, 128)}, rank=4)
    with pytest.raises(AdapterMismatchError, match=r"lora_A \[4, 128\] and lora_B \[256, 4\] at"):
        read(wide, llama)


def test_config_and_weights_must_agree_on_the_rank(tmp_path, llama):
    folder = small(tmp_path, llama, rank=4)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(AdapterMismatchError, match=r"or its adapter_config.json is"):
        read(folder, llama)


def test_files_must_be_there_and_whole(tmp_path, llama):
    with pytest.raises(AdapterNotFoundError, match=r"has no adapter_config.json; pass a folder"):
        read(tmp_path / "nowhere", llama)
    folder = small(tmp_path, llama)
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    with pytest.raises(AdapterNotFoundError, match="promises"):
        read(folder, llama)
    weights.unlink()
    with pytest.raises(AdapterNotFoundError, match=r"has no adapter_model.safetensors"):
        read(folder, llama)
    weights.write_bytes(content)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterNotFoundError, match="cannot be read as JSON"):
        read(folder, llama)


def test_tensors_must_be_pairs_of_matrices(tmp_path, llama):
    folder = small(tmp_path, llama)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    a = f"{PREFIX}{Q_PROJ}.lora_A.weight"
    with pytest.raises(AdapterNotFoundError, match="lora_A without lora_B, or the reverse, for mo"):
        read(write_files(tmp_path / "half", config, {a: tensors[a]}), llama)
    with pytest.raises(AdapterNotFoundError, match="has no lora_A and lora_B"):
        read(write_files(tmp_path / "none", config, {}), llama)
    magnitude = {f"{PREFIX}{Q_PROJ}.lora_magnitude_vector": np.ones(64)}
    with pytest.raises(UnsupportedAdapterError, match="lora_magnitude_vector is neither lora_A"):
        read(write_files(tmp_path / "dora", config, tensors | magnitude), llama)


def test_what_hides_behind_a_name_of_the_hub_is_fetched(llama, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AdapterNotFoundError, match="could not be fetched from the Hugging Face Hu"):
        read_adapter("nobody/nothing", llama, max_rank=8, dtype="float32")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_names_in_a_multimodal_model_are_those_of_its_language_model(data_dir, tmp_path, prefix):
    model = adaptable(data_dir, "qwen2_vl")
    layer = next(layer for layer in model.layers if layer.module == Q_PROJ)
    module = Q_PROJ.replace("model.", prefix, 1)
    folder = write_adapter(tmp_path, {module: (layer.num_outputs, layer.num_inputs)})
    assert list(read(folder, model).layers) == [layer.path]


def test_layers_of_quantised_models_are_the_same(data_dir, llama):
    quantised = adaptable(data_dir, "llama_gptq_sym").layers
    assert [dataclasses.astuple(layer) for layer in quantised] == [
        dataclasses.astuple(layer) for layer in llama.layers
    ]
