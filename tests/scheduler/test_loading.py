"""Defaults and limits that depend on model and device."""

import dataclasses

import pytest

from paged.models.config import ModelConfig
from paged.models.latent_config import LatentConfig
from paged.models.quantized.formats import read_quantization
from paged.scheduler.backend_choice import kv_element_type
from paged.scheduler.buckets import Bucket
from paged.scheduler.config import PERFORMANCE_MODES, EngineConfig, StepLimits
from paged.scheduler.memory import activation_bytes, weight_bytes
from paged.scheduler.resolution import make_bucket_table, resolve_config

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def resolve(**settings) -> EngineConfig:
    return resolve_config(EngineConfig(**settings), MODEL)


def test_limits_of_a_cpu_are_the_references():
    assert StepLimits.of(resolve()) == StepLimits(512, 128, 2048)


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({"max_model_len": 100}, (100, 128, 2048)),
        ({"max_num_seqs": 4000}, (512, 4000, 4000)),
        ({"max_num_batched_tokens": 64}, (512, 64, 64)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 16}, (512, 8, 16)),
    ],
)
def test_a_limit_that_is_given_bounds_the_default_of_the_other(settings, limits):
    assert StepLimits.of(resolve(**settings)) == StepLimits(*limits)


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, (512, 256, 4096)),
        ({"max_num_seqs": 10}, (512, 10, 4096)),
        ({"max_num_batched_tokens": 300}, (512, 256, 300)),
        ({"max_num_batched_tokens": 100}, (512, 100, 100)),
    ],
)
def test_throughput_doubles_the_limits_that_are_not_given(settings, limits):
    config = resolve(performance_mode="throughput", **settings)
    assert StepLimits.of(config) == StepLimits(*limits)
    assert config.long_prefill_token_threshold == 0


@pytest.mark.parametrize(
    ("settings", "threshold"),
    [
        ({}, 256),
        ({"max_num_batched_tokens": 128}, 16),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 4}, 1),
        ({"long_prefill_token_threshold": 77}, 77),
        ({"enable_chunked_prefill": False}, 0),
    ],
)
def test_interactivity_bounds_what_a_prompt_takes_of_a_shared_step(settings, threshold):
    config = resolve(performance_mode="interactivity", **settings)
    assert config.long_prefill_token_threshold == threshold


def test_interactivity_has_more_shapes_than_the_other_modes():
    buckets = {
        mode: make_bucket_table(resolve(performance_mode=mode, linear_backend="xla")).buckets
        for mode in PERFORMANCE_MODES
    }
    assert Bucket(24, 24) in buckets["interactivity"]
    assert Bucket(24, 24) not in buckets["balanced"]
    assert buckets["balanced"][-1] == Bucket(2048, 128)
    assert buckets["throughput"][-1] == Bucket(4096, 256)


def test_only_native_linear_layers_have_a_shape_of_one_row(native):
    smallest = {
        backend: make_bucket_table(resolve(linear_backend=backend)).buckets[0]
        for backend in ("native", "xla")
    }
    assert smallest == {"native": Bucket(1, 1), "xla": Bucket(8, 8)}


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({}, 2048),
        ({"enable_chunked_prefill": False}, 4096),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, 2048),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 5000}, 5000),
    ],
)
def test_a_step_holds_the_longest_prompt_where_prompts_are_not_cut(settings, budget):
    model = dataclasses.replace(MODEL, max_position_embeddings=4096)
    resolved = resolve_config(EngineConfig(**settings), model)
    assert StepLimits.of(resolved).max_num_batched_tokens == budget


def test_a_step_too_small_for_a_whole_prompt_is_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match="max_num_batched_tokens=64 must be at least max_model_len"
    ):
        resolve(enable_chunked_prefill=False, max_num_batched_tokens=64)


def test_unresolved_limits_are_a_mistake_of_ours():
    with pytest.raises(RuntimeError, match=r"Call resolve_config\(\) first"):
        StepLimits.of(EngineConfig())


def test_types_follow_the_checkpoint_unless_given():
    assert resolve().dtype == "bfloat16"
    assert resolve().kv_cache_dtype == "bfloat16"
    assert resolve(dtype="float32").kv_cache_dtype == "float32"
    assert resolve(dtype="float32", kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "resolved", "element_type"),
    [
        ("fp8", "fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e4m3", "fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "fp8_e5m2", "float8_e5m2"),
    ],
)
def test_8_bit_caches_have_the_references_names(asked, resolved, element_type):
    config = resolve(kv_cache_dtype=asked)
    assert config.kv_cache_dtype == resolved
    assert kv_element_type(config.kv_cache_dtype) == element_type


def test_weight_bytes_count_every_parameter_once():
    layer = 64 * 64 * 2 + 2 * (64 * 32) + 3 * (64 * 128) + 2 * 64
    assert weight_bytes(resolve(), MODEL) == 2 * (1000 * 64 + 2 * layer + 64)


def test_int8_weights_take_one_byte_and_a_scale_per_output():
    outputs = 64 + 2 * 32 + 64 + 2 * 128 + 64
    weights = 64 * 64 * 2 + 2 * (64 * 32) + 3 * (64 * 128)
    layer = weights + 4 * outputs + 2 * (2 * 64)
    head = 1000 * 64 + 4 * 1000
    assert weight_bytes(resolve(quantization="int8"), MODEL) == head + 2 * layer + 2 * 64


def test_activation_bytes_grow_with_both_limits():
    small = activation_bytes(resolve(max_num_batched_tokens=256), MODEL)
    assert activation_bytes(resolve(max_num_batched_tokens=512), MODEL) > small
    assert activation_bytes(resolve(max_num_batched_tokens=256, max_num_seqs=256), MODEL) > small


def test_activation_bytes_have_room_for_queries_of_the_width_of_latent_vectors():
    config = resolve(max_num_batched_tokens=256)
    latent = dataclasses.replace(
        MODEL, latent=LatentConfig(512, None, 128, 64, 128), head_dim=576, num_kv_heads=1
    )
    width = 256 * MODEL.num_q_heads * 576 * 4
    assert activation_bytes(config, latent) >= activation_bytes(config, MODEL) + 4 * width


def test_activation_bytes_have_room_for_a_weight_that_is_widened():
    plain, int4 = (activation_bytes(resolve(quantization=name), MODEL) for name in (None, "int4"))
    assert int4 - plain == 4 * 64 * 128


def test_quantization_of_the_checkpoint_is_that_of_the_engine():
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    model = dataclasses.replace(MODEL, quantization=read_quantization({"quantization_config": awq}))
    assert resolve_config(EngineConfig(), model).quantization == "awq"
    assert resolve_config(EngineConfig(quantization="awq"), model).quantization == "awq"
    with pytest.raises(ValueError, match="quantization='int4' contradicts the checkpoint"):
        resolve_config(EngineConfig(quantization="int4"), model)
    with pytest.raises(ValueError, match="quantization='gptq' needs a checkpoint"):
        resolve_config(EngineConfig(quantization="gptq"), MODEL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"block_size": -1}, "block_size=-1 must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5 must be in \(0, 1\]"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype='fp7' is unknown; choose one of auto, bf"),
        ({"dtype": "int8"}, "dtype='int8' is unknown"),
        ({"performance_mode": "ludicrous"}, "performance_mode='ludicrous' is unknown"),
        ({"attention_backend": "abacus"}, "attention_backend='abacus' is unknown"),
        ({"linear_backend": "abacus"}, "linear_backend='abacus' is unknown"),
        ({"quantization": "int3"}, "quantization='int3' is unknown; choose one of int8"),
        ({"generation_config": "mine"}, "generation_config='mine' is unknown"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            "max_num_batched_tokens=4 must be at least max_num_seqs=8",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(("asked", "resolved"), [(None, False), (True, True), (False, False)])
def test_steps_are_planned_ahead_on_a_cpu_only_if_asked(asked, resolved):
    config = resolve_config(EngineConfig(async_scheduling=asked), MODEL)
    assert config.async_scheduling is resolved
