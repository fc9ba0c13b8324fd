"""Multimodal checkpoints as language models: their configs, their tensors, and their logits."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.registry import ARCHITECTURES
from paged.models.text_part import TEXT_PARTS, text_tensors
from paged.models.weights import SafetensorsSource, load_params
from tests.models.helpers import PagedModel, prefill_in_chunks

GOLDENS = ("gemma3_vision", "mistral3_vision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def read_config(data_dir: Path, name: str, file: str = "config.json") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((data_dir / "golden/tiny" / name / file).read_text())
    return config


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_and_greedy_tokens_of_text_equal_the_reference(data_dir: Path, name: str):
    config = ModelConfig.from_hf(read_config(data_dir, name))
    folder = data_dir / "golden/tiny" / name
    params = load_params(config, SafetensorsSource(folder), dtype="float32", progress=False)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    model = PagedModel(config, params, dtype="float32")
    logits = prefill_in_chunks(
        model, {i: case["prompt_ids"] for i, case in enumerate(cases)}, {0: 5, 1: 16}
    )
    for i, case in enumerate(cases):
        np.testing.assert_allclose(logits[i], case["logits"], atol=1e-4, rtol=1e-5)
    last = [logits[i][-1] for i in range(len(cases))]
    for step in range(len(cases[0]["greedy_ids"])):
        for i, case in enumerate(cases):
            if min(case["greedy_gaps"][: step + 1]) > 1e-3:
                assert last[i].argmax() == case["greedy_ids"][step], (i, step)
        rows = model.logits({i: [case["greedy_ids"][step]] for i, case in enumerate(cases)})
        last = [rows[i][-1] for i in range(len(cases))]


@pytest.mark.parametrize("name", GOLDENS)
def test_both_spellings_of_a_config_mean_the_same(data_dir: Path, name: str):
    current, classic = (
        ModelConfig.from_hf(read_config(data_dir, name, file))
        for file in ("config.json", "config_classic.json")
    )
    assert current == classic
    assert (current.vocab_size, current.num_layers, current.dtype) == (256, 2, "bfloat16")
    assert (current.bos_token_id, current.eos_token_ids) == (1, (2,))


def test_the_published_config_of_gemma_3_4b_is_completed():
    config = ModelConfig.from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.vocab_size, config.num_q_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.max_position_embeddings) == (256, 131072)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.sliding_rope is not None
    assert (config.sliding_rope.kind, config.sliding_rope.theta) == ("default", 1e4)
    assert config.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert config.tie_word_embeddings
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")


OTHER_NAMES = {
    # As transformers has had them since it nests models, and before.
    "gemma3_vision": (("language_model.model.", "model.language_model."), ("visi", "model.visi")),
    "mistral3_vision": (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head", "lm_head"),
        ("visi", "model.visi"),
        ("multi", "model.multi"),
    ),
    "qwen2_5_vl": (("model.", "model.language_model."), ("visual.", "model.visual.")),
    "qwen3_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_tensors_are_found_under_either_name(data_dir: Path, tmp_path: Path, name: str):
    folder = data_dir / "golden/tiny" / name
    tensors = {}
    for old, values in load_file(folder / "model.safetensors").items():
        prefix, new = next((row for row in OTHER_NAMES[name] if old.startswith(row[0])), ("", ""))
        tensors[new + old.removeprefix(prefix)] = values
    save_file(tensors, tmp_path / "model.safetensors")
    sources = [text_tensors(SafetensorsSource(path)) for path in (folder, tmp_path)]
    assert sorted(sources[0].names()) == sorted(sources[1].names())
    for tensor in sources[0].names():
        assert sources[0].shape(tensor) == sources[1].shape(tensor)
        np.testing.assert_array_equal(sources[0].read(tensor), sources[1].read(tensor))
    sources[1].close()
    with pytest.raises(KeyError):
        sources[1].read("model.norm.weight")


def test_what_is_left_out_is_told_once(data_dir: Path, caplog: pytest.LogCaptureFixture):
    folder = data_dir / "golden/tiny/mistral3_vision"
    with caplog.at_level(logging.INFO):
        text_tensors(SafetensorsSource(folder))
    (record,) = caplog.records
    assert "Text only: " in record.message
    assert "tensors of multi_modal_projector and vision_tower are left out" in record.message


def test_a_tensor_of_an_unknown_part_is_refused(data_dir: Path, tmp_path: Path):
    folder = data_dir / "golden/tiny/qwen2_vl"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"audio_tower.x": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    config = ModelConfig.from_hf(read_config(data_dir, "qwen2_vl"))
    with pytest.raises(CheckpointError, match=r"unexpected: audio_tower\.x"):
        load_params(config, SafetensorsSource(tmp_path), dtype="float32", progress=False)


def test_tied_embeddings_may_be_said_in_either_place(data_dir: Path):
    raw = read_config(data_dir, "qwen3_vl")
    del raw["tie_word_embeddings"]
    for outer, inner, expected in (
        ({}, {}, False),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": False}, {}, False),
    ):
        text = {k: v for k, v in raw["text_config"].items() if k != "tie_word_embeddings"}
        config = ModelConfig.from_hf(raw | outer | {"text_config": text | inner})
        assert config.tie_word_embeddings is expected


def test_modules_of_a_quantisation_go_by_the_names_of_the_language_model(data_dir: Path):
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [
            "language_model.lm_head",
            "model.language_model.layers.0.mlp.up_proj",
            "vision_tower.x",
        ],
    }
    raw = read_config(data_dir, "mistral3_vision") | {"quantization_config": quantization}
    formats = ModelConfig.from_hf(raw).quantization
    assert formats is not None
    assert formats.scheme("model.layers.0.mlp.up_proj") is None
    assert formats.scheme("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        (
            "mistral3_vision",
            {"text_config": {"model_type": "ministral3"}},
            UnsupportedModelError,
            "model_type='ministral3' is not implemented for Mistral3.*; supported: mistral",
        ),
        (
            "gemma3_vision",
            {"text_config": None},
            CheckpointError,
            r"text_config of the model's config \(Gemma3For.*\) is None; it must hold the shape",
        ),
        (
            "qwen2_vl",
            {"text_config": "x"},
            CheckpointError,
            r"text_config of the model's config \(Qwen2VL.*\) is 'x'",
        ),
    ],
)
def test_other_language_models_are_refused(
    data_dir: Path, name: str, changes: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        ModelConfig.from_hf(read_config(data_dir, name) | changes)


def test_each_multimodal_architecture_is_registered_with_its_tensors():
    assert {
        name for name, row in ARCHITECTURES.items() if row.arrange is text_tensors
    } == TEXT_PARTS.keys()
