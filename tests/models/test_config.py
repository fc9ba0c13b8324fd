"""What `ModelConfig.from_hf` reads, and what it refuses with which words."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from paged.models.config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
)
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.registry import ARCHITECTURES
from paged.models.rope_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope_of(scaling: dict[str, Any] | None, **outside: Any) -> RopeConfig:
    return ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling, **outside}).rope


def test_every_field_is_read() -> None:
    config = ModelConfig.from_hf(
        {
            **LLAMA,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float16",
            "rope_theta": 5e5,
        }
    )
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5),
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float16",
        attention_output_bias=True,
    )


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    keys = set(LLAMA) - {"num_key_value_heads"}
    config = ModelConfig.from_hf({key: LLAMA[key] for key in keys})
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "llama3_rope",
        "mistral",
        "olmo2",
        "phi3",
        "phi3_longrope",
        "phi3_partial_rope",
        "qwen2_yarn",
        "qwen3",
    ],
)
def test_current_and_classic_spelling_mean_the_same(data_dir: Path, name: str) -> None:
    folder = data_dir / "golden" / "tiny" / name
    current, classic = (
        ModelConfig.from_hf(json.loads((folder / file).read_text()))
        for file in ("config.json", "config_classic.json")
    )
    assert current == classic


def test_config_is_hashable() -> None:
    assert len({ModelConfig.from_hf(LLAMA), ModelConfig.from_hf(dict(LLAMA))}) == 1


@pytest.mark.parametrize(("given", "ids"), [(2, (2,)), ([2, 5], (2, 5)), (None, ())])
def test_eos_is_an_id_or_a_list(given: object, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": given}).eos_token_ids == ids


def test_qwen2_has_biases_on_q_k_and_v_only() -> None:
    config = ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert config.attention_bias
    assert not config.attention_output_bias
    assert not config.mlp_bias


def windows_of(architecture: str, **keys: Any) -> tuple[int | None, ...]:
    config = {**LLAMA, "num_hidden_layers": 4, "architectures": [architecture], **keys}
    return ModelConfig.from_hf(config).layer_windows


# The rules are those of transformers' Qwen2Config and MistralConfig.
@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),  # 28 layers are full
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
    ],
)
def test_qwen2_slides_above_its_full_layers(
    keys: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert windows_of("Qwen2ForCausalLM", **keys) == windows


@pytest.mark.parametrize(
    ("keys", "windows"),
    [({}, (4096,) * 4), ({"sliding_window": 8}, (8,) * 4), ({"sliding_window": None}, (None,) * 4)],
)
def test_mistral_slides_in_every_layer_or_in_none(
    keys: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert windows_of("MistralForCausalLM", **keys) == windows


def test_mistral_has_no_biases() -> None:
    config = ModelConfig.from_hf({**LLAMA, "architectures": ["MistralForCausalLM"]})
    assert not any((config.attention_bias, config.attention_output_bias, config.mlp_bias))


def test_layers_attend_fully_unless_told_otherwise() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.layer_windows == (None, None)
    with pytest.raises(ValueError, match="layer_windows has 3 entries for num_layers=2"):
        dataclasses.replace(config, layer_windows=(None, None, 8))


def test_registry_and_config_know_the_same_architectures() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(ARCHITECTURES)


GEMMA = {**LLAMA, "head_dim": 16, "num_hidden_layers": 7}


def test_gemma_takes_the_defaults_of_its_own_config_class() -> None:
    # What published files leave out (transformers' Gemma2Config and Gemma3TextConfig).
    gemma2 = ModelConfig.from_hf({**GEMMA, "architectures": ["Gemma2ForCausalLM"]})
    assert gemma2.tie_word_embeddings
    assert gemma2.activation == "gelu_tanh"
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (50.0, 30.0)
    assert gemma2.attention_scale == 256**-0.5
    assert gemma2.embedding_multiplier == 8.0
    assert gemma2.layer_windows == (4096, None) * 3 + (4096,)
    gemma3 = ModelConfig.from_hf({**GEMMA, "architectures": ["Gemma3ForCausalLM"]})
    assert (gemma3.attention_soft_cap, gemma3.logit_soft_cap) == (None, None)
    assert gemma3.layer_windows == (4096,) * 5 + (None, 4096)
    assert gemma3.layer_rope(0) == RopeConfig(theta=1e4)
    assert gemma3.layer_rope(5) == RopeConfig(theta=1e6)


def test_gemma_3_scales_full_layers_only() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "rope_scaling": scaling}
    gemma3 = ModelConfig.from_hf({**config, "sliding_window_pattern": 2})
    assert gemma3.layer_rope(1) == RopeConfig("linear", 1e6, 8.0)
    assert gemma3.layer_rope(2) == RopeConfig(theta=1e4)


def test_gemma_3_needs_both_rotary_embeddings() -> None:
    config = {**GEMMA, "architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(CheckpointError, match=r"rope_parameters .* lacks sliding_attention"):
        ModelConfig.from_hf({**config, "rope_parameters": {"full_attention": {}}})


LONGROPE = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_longrope_takes_the_factors_of_the_longest_context() -> None:
    config = ModelConfig.from_hf(
        {
            **LLAMA,
            "architectures": ["Phi3ForCausalLM"],
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 128,
        }
    )
    assert config.rope == RopeConfig(
        "longrope",
        factor=4.0,
        original_max_position_embeddings=128,
        short_factor=(1.0,) * 8,
        long_factor=(2.0,) * 8,
        context_length=512,
    )
    assert config.for_context(128).rope.context_length == 128
    plain = ModelConfig.from_hf(LLAMA)
    assert plain.for_context(128) is plain


def test_longrope_needs_a_factor_for_each_pair() -> None:
    with pytest.raises(CheckpointError, match=r"long_factor .* must be a list of 8 numbers"):
        rope_of({**LONGROPE, "long_factor": [2.0] * 7})
    with pytest.raises(CheckpointError, match=r"short_factor\[2\]=0 .* must be a positive"):
        rope_of({**LONGROPE, "short_factor": [1, 1, 0, 1, 1, 1, 1, 1]})


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_rope_kind_has_two_spellings(spelling: str) -> None:
    rope = rope_of({spelling: "linear", "factor": 2}, rope_theta=5e5)
    assert rope == RopeConfig("linear", 5e5, 2.0)


def test_rope_parameters_hold_theta_inside() -> None:
    inside = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e5}
    config = ModelConfig.from_hf({**LLAMA, "rope_parameters": inside, "rope_theta": 1.0})
    assert config.rope == RopeConfig("dynamic", 5e5, 4.0, 512)


def test_llama3_rope_is_read() -> None:
    assert rope_of(LLAMA3) == RopeConfig("llama3", 10000.0, 8.0, 64, 1.0, 4.0)


def test_yarn_rope_is_read_with_its_options() -> None:
    rope = rope_of(
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        }
    )
    assert rope == RopeConfig(
        "yarn",
        10000.0,
        4.0,
        128,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.5,
        mscale=0.7,
        mscale_all_dim=0.9,
        truncate=False,
    )


def test_yarn_without_factor_takes_the_ratio_of_the_lengths() -> None:
    rope = rope_of({"type": "yarn", "original_max_position_embeddings": 128, "mscale": 0})
    assert (rope.factor, rope.mscale, rope.truncate) == (4.0, None, True)


@pytest.mark.parametrize(
    "key", sorted(set(LLAMA) - {"num_key_value_heads"}), ids=lambda key: f"without-{key}"
)
def test_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(CheckpointError, match=f"config has no '{key}'"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_missing_rope_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"config has no '{key}'"):
        rope_of({name: value for name, value in LLAMA3.items() if name != key})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size='many' of the model's config must be a positive int"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1 of the model's config must be a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"architectures": []}, "architectures=.. of the model's config must be a list"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 .* is not a multiple of num_key_value_heads=3",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor=1.0 .* must exceed low_freq_factor=1.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor=-2"),
        (
            {"layer_types": ["full_attention"] * 3},
            "layer_types of the model's config has 3 entries for 2 layers",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window=0 of the model's config must be a positive int",
        ),
    ],
)
def test_impossible_value_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is not implemented; supported: DeepseekV2ForCausalLM, DeepseekV3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented; supported: silu, swish"),
        ({"sliding_window": 8}, "sliding_window=8 is not implemented for LlamaForCausalLM"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types with sliding_attention are not implemented for a model with sliding_win",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types with linear_attention are not implemented",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'.*bits=None is not"),
        ({"quantization_config": []}, r"quant_method='\?'"),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_type='ntk' is not implemented; supported: default, linear, dynamic, llama3",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters by layer type"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 of head_dim=16 is not"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor=2.0 of head_dim=16 is not"),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "head_dim": 16,
                "use_bidirectional_attention": True,
            },
            "use_bidirectional_attention is not implemented",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' of the checkpoint"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
    ],
)
def test_what_is_not_implemented_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})
