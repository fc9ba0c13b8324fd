"""What a config says about experts, and which routing is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged.models.config import ModelConfig, UnsupportedModelError
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model
from paged.models.latent_config import LatentConfig, latent_scale
from paged.models.moe_config import ExpertsConfig, GroupRouting
from paged.models.rope_config import RopeConfig

DEEPSEEK = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_plain")
NAMES = (*DEEPSEEK, "gpt_oss", "gpt_oss_mxfp4", "mixtral", "qwen3_moe")


def read(data_dir: Path, name: str, file: str = "config.json", **changes: Any) -> ModelConfig:
    config = json.loads((data_dir / "golden" / "tiny" / name / file).read_text())
    return ModelConfig.from_hf(config | changes)


def experts(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_a_config_say_the_same(data_dir: Path, name: str):
    assert read(data_dir, name) == read(data_dir, name, "config_classic.json")


def test_mixtral_has_a_window_only_if_its_config_names_one(data_dir: Path):
    assert experts(read(data_dir, "mixtral")) == ExpertsConfig(4, 2, 64)
    assert read(data_dir, "mixtral").layer_windows == (None, None)
    assert read(data_dir, "mixtral", sliding_window=16).layer_windows == (16, 16)


@pytest.mark.parametrize(
    ("step", "dense_only", "dense"),
    [(1, [], ()), (2, [], (0, 2, 4)), (1, [3, 1], (1, 3)), (3, [2], (0, 1, 2, 3, 4))],
)
def test_qwen3_layers_are_dense_where_the_config_says_so(
    data_dir: Path, step: int, dense_only: list[int], dense: tuple[int, ...]
):
    changes = {"decoder_sparse_step": step, "mlp_only_layers": dense_only, "num_hidden_layers": 5}
    config = experts(read(data_dir, "qwen3_moe", **changes))
    assert config.dense_layers == dense
    assert (config.num_experts, config.intermediate_size) == (8, 32)


def test_scores_of_qwen3_are_normalized_if_the_config_says_so(data_dir: Path):
    assert experts(read(data_dir, "qwen3_moe")).normalize
    assert not experts(read(data_dir, "qwen3_moe", norm_topk_prob=None)).normalize


def test_gpt_oss_alternates_windows_and_has_sinks_and_biases(data_dir: Path):
    config = read(data_dir, "gpt_oss", layer_types=None, num_hidden_layers=3)
    assert config.layer_windows == (8, None, 8)
    assert config.attention_sinks
    assert config.attention_bias
    assert config.attention_output_bias
    assert experts(config) == ExpertsConfig(
        4, 2, 64, router_bias=True, expert_bias=True, activation="clamped_swiglu"
    )
    assert experts(read(data_dir, "gpt_oss_mxfp4")).is_mxfp4


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"n_shared_experts": 2}, "n_shared_experts=2: this routing is not implemented"),
        (
            "qwen3_moe",
            {"n_group": 8, "topk_group": 4},
            "n_group=8, topk_group=4: .* supported: num",
        ),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act='relu' is not implemented"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        (
            "mixtral",
            {"architectures": ["Qwen2MoeForCausalLM"]},
            "shared experts.*supported: .*Mixt",
        ),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, r"'awq'.*supported: mxfp4"),
        ("mixtral", {"architectures": ["DeepseekV32ForCausalLM"]}, "an indexer chooses"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': this rou.*'greedy'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True: .* not implemented"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True is not implemented for DeepseekV2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.* of 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2: this routing"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd; rotary embedding"),
    ],
)
def test_what_is_not_implemented_is_named(
    data_dir: Path, name: str, changes: dict[str, Any], message: str
):
    with pytest.raises(UnsupportedModelError, match=message):
        read(data_dir, name, **changes)


def test_deepseek_v2_is_read(data_dir: Path):
    config = read(data_dir, "deepseek_v2")
    assert (config.num_kv_heads, config.head_dim, config.kv_planes) == (1, 40, 1)
    assert config.latent == LatentConfig(32, 24, 16, 8, 12)
    routing = GroupRouting(num_groups=4, num_chosen_groups=2, scale=1.6)
    assert experts(config) == ExpertsConfig(
        8, 3, 32, normalize=False, dense_layers=(0,), routing=routing, shared_size=64
    )
    assert config.attention_scale == pytest.approx(24**-0.5)


def test_deepseek_v3_takes_the_defaults_of_transformers(data_dir: Path):
    absent = dict.fromkeys(
        ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts")
    )
    changes = absent | {"first_k_dense_replace": None, "n_routed_experts": 16}
    config = experts(read(data_dir, "deepseek_v3", **changes, num_hidden_layers=5))
    routing = GroupRouting(True, 8, 4, has_bias=True, scale=2.5)
    assert config == ExpertsConfig(
        16, 3, 32, dense_layers=(0, 1, 2), routing=routing, shared_size=32
    )
    sparse = experts(read(data_dir, "deepseek_v3", first_k_dense_replace=0))
    assert sparse.dense_layers == ()


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        (RopeConfig(), 1.0),
        (RopeConfig("yarn", factor=40.0, mscale=1.0), 1.0),
        # 0.1 ln(40) + 1 = 1.3689, squared: what DeepSeek's inference code multiplies by.
        (RopeConfig("yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0), 1.8738542),
        (RopeConfig("yarn", factor=40.0, mscale=0.707, mscale_all_dim=0.707), 1.5896262),
    ],
)
def test_yarn_scales_latent_logits(rope: RopeConfig, factor: float):
    latent = LatentConfig(512, None, 128, 64, 128)
    assert latent_scale(latent, rope) == pytest.approx(192**-0.5 * factor, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group=3 of the model's config must divide its 8 experts"),
        ({"topk_group": 5}, "topk_group=5 must not exceed it"),
        ({"topk_group": 1}, "num_experts_per_tok=3 .* the experts of topk_group=1 of its 4 groups"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 .* must be a positive integer"),
        ({"kv_lora_rank": None}, "has no 'kv_lora_rank'"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 of the model's config must be a positive integer"),
        ({"n_routed_experts": None}, "has no 'n_routed_experts'"),
    ],
)
def test_impossible_deepseek_configs_are_refused(
    data_dir: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(CheckpointError, match=message):
        read(data_dir, "deepseek_v3", **changes)


def test_other_experts_become_int8_and_mxfp4_stays(data_dir: Path):
    for name, element in (("mixtral", "int8"), ("gpt_oss_mxfp4", "uint8")):
        _, params = abstract_model(read(data_dir, name), dtype="bfloat16", quantization="int4")
        weight = params["layers"][0]["mlp"]["experts"]["up_proj"]["weight"]
        assert weight["values"].dtype == element


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, "has no 'num_local_experts'"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 of the model's config must be a pos"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 of the model's config exceeds its 4"),
    ],
)
def test_impossible_numbers_of_experts_are_refused(
    data_dir: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(CheckpointError, match=message):
        read(data_dir, "mixtral", **changes)
