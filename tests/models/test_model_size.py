"""Parameters and bytes of weights: the model itself, built abstractly, and published counts."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model
from paged.models.latent_config import LatentConfig
from paged.models.model_size import model_size
from paged.models.moe_config import ExpertsConfig, GroupRouting
from paged.models.tensor_parallel import TensorParallel
from paged.models.weight_bytes import count_weight_bytes
from paged.sharding import ShardingRules

GOLDEN = Path(__file__).parents[1] / "data/golden/tiny"
TINY = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))


def tiny(name: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / name / "config.json").read_text()))


def leaves(model: ModelConfig, quantization: str | None = None) -> list[jax.ShapeDtypeStruct]:
    _, params = abstract_model(model, dtype="bfloat16", quantization=quantization)
    return jax.tree.leaves(params)


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_the_model(name: str):
    config = tiny(name)
    experts = config.experts and dataclasses.replace(config.experts, is_mxfp4=False)
    plain = dataclasses.replace(config, quantization=None, experts=experts)
    assert model_size(config).total == sum(math.prod(leaf.shape) for leaf in leaves(plain))


# Published configs, and the parameters that their tensors and papers count.
MIXTRAL = ModelConfig(
    "MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 128,
    max_position_embeddings=32768, rms_norm_eps=1e-5, experts=ExpertsConfig(8, 2, 14336),
)  # fmt: skip
QWEN3_30B_A3B = ModelConfig(
    "Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, 128, qk_norm="head",
    max_position_embeddings=40960, rms_norm_eps=1e-6, experts=ExpertsConfig(128, 8, 768),
)  # fmt: skip
GPT_OSS_20B = ModelConfig(
    "GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8, 64, attention_bias=True,
    attention_output_bias=True, attention_sinks=True, max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    experts=ExpertsConfig(32, 4, 2880, router_bias=True, expert_bias=True, is_mxfp4=True),
)  # fmt: skip
DEEPSEEK_V2_LITE = ModelConfig(
    "DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16, 1, 576,
    max_position_embeddings=163840, rms_norm_eps=1e-6,
    latent=LatentConfig(512, None, 128, 64, 128),
    experts=ExpertsConfig(
        64, 6, 1408, normalize=False, dense_layers=(0,), routing=GroupRouting(), shared_size=2816
    ),
)  # fmt: skip
DEEPSEEK_V3 = ModelConfig(
    "DeepseekV3ForCausalLM", 129280, 7168, 18432, 61, 128, 1, 576,
    max_position_embeddings=163840, rms_norm_eps=1e-6,
    latent=LatentConfig(512, 1536, 128, 64, 128),
    experts=ExpertsConfig(
        256, 8, 2048, dense_layers=(0, 1, 2), shared_size=2048,
        routing=GroupRouting(True, 8, 4, has_bias=True, scale=2.5),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        (MIXTRAL, 46_702_792_704, 12.9e9),
        (QWEN3_30B_A3B, 30_532_122_624, 3.3e9),
        (GPT_OSS_20B, 20_914_757_184, 4.2e9),  # 3.6e9 without the embedding, which is not a product
        (DEEPSEEK_V2_LITE, 15_706_484_224, 2.66e9),
        # 14,848 are biases of the choice of experts; "37B activated".
        (DEEPSEEK_V3, 671_026_404_352 + 58 * 256, 37.5e9),
    ],
)
def test_mixtures_have_the_published_number_of_parameters(
    model: ModelConfig, total: int, active: float
):
    size = model_size(model)
    assert size.total == total
    assert size.active == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", ["olmo2", "mixtral", "gpt_oss_mxfp4", "llama_awq", "deepseek_v3"])
def test_bytes_are_those_of_the_parameters(name: str):
    config = tiny(name)
    config = dataclasses.replace(config, num_layers=3, layer_windows=())
    for quantization in (None,) if config.quantization else (None, "int8", "int4", "fp8"):
        expected = sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves(config, quantization)
        )
        found = count_weight_bytes(config, dtype="bfloat16", quantization=quantization)
        assert found.total == expected, quantization


def test_dense_layers_of_a_mixture_are_counted_as_such():
    config = dataclasses.replace(tiny("qwen3_moe"), num_layers=4, layer_windows=())
    assert config.experts is not None
    mixed = dataclasses.replace(
        config, experts=dataclasses.replace(config.experts, dense_layers=(1,))
    )
    found = count_weight_bytes(mixed, dtype="bfloat16", quantization=None)
    assert (
        found.total
        == 2 * model_size(mixed).total
        == 2 * sum(math.prod(leaf.shape) for leaf in leaves(mixed))
    )
    # Two bytes for each parameter of three layers' experts.
    assert found.experts == 2 * model_size(mixed).experts


def test_experts_are_one_devices_share():
    config = tiny("mixtral")
    whole = count_weight_bytes(config, dtype="bfloat16", quantization=None)
    for rules in (ShardingRules(), ShardingRules(experts="tp")):
        part = TensorParallel(config, 2, rules).part
        found = count_weight_bytes(part, dtype="bfloat16", quantization=None)
        assert found.experts * 2 == whole.experts
        assert found.head * 2 == whole.head
