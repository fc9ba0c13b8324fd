"""The roofline: published sizes, steps computed by hand, memory, what is refused."""

import dataclasses
import json

import pytest

from paged.models.config import ModelConfig
from paged.models.model_size import ModelSize, model_size
from paged.models.moe_config import ExpertsConfig
from paged.models.weight_bytes import WeightBytes
from paged.scheduler.errors import CapacityError
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.document_traces import cyclic
from paged.scheduler.simulator.gpus import GPU, GPUS, find_gpu
from paged.scheduler.simulator.model_presets import MODELS, find_model
from paged.scheduler.simulator.roofline import Roofline
from paged.scheduler.simulator.simulate import simulate
from paged.scheduler.simulator.step_cost import StepLoad

# 1 GFLOP/s (8-bit: 2), 1 MB/s, 1 GB, link 1 kB/s.
GPU_BY_HAND = GPU("by hand", 1e9, 2e9, 1e6, 10**9, 1e3)
# D 4, MLP 8, 2 layers, 2 q heads, 1 kv head of 2, vocabulary 10.
MODEL_BY_HAND = ModelConfig(
    "LlamaForCausalLM", 10, 4, 8, 2, 2, 1, 2, max_position_embeddings=64, rms_norm_eps=1e-5
)


def by_hand(**settings) -> Roofline:
    exact = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "step_overhead_seconds": 0.0}
    return Roofline(GPU_BY_HAND, MODEL_BY_HAND, **exact | settings)


# Numbers of parameters as counted in the published checkpoints.
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, total: int):
    assert model_size(MODELS[name]).total == total


def test_parameters_by_hand():
    # Per layer: q 4x4, k and v 4x2 each, output 4x4, MLP 3 x 4x8: 144; two norms of 4.
    assert model_size(MODEL_BY_HAND) == ModelSize(288, 40, 2 * (144 + 8) + 4 + 2 * 40)
    biased = dataclasses.replace(
        MODEL_BY_HAND, attention_bias=True, attention_output_bias=True, mlp_bias=True
    )
    # q, k, v: 8; output: 4; gate and up: 16, down: 4.
    assert model_size(biased).total == model_size(MODEL_BY_HAND).total + 2 * (8 + 4 + 16 + 4)


def test_decode_reads_weights_and_context():
    # 3 rows with contexts 10, 20, 30. Weights 2 (288 + 40) bytes; a token's keys and values are
    # 2 x 2 layers x 1 head x 2 x 2 bytes = 16; 60 tokens read, 3 written.
    seconds = by_hand().step_seconds(StepLoad(3, 3, 60, 60))
    assert seconds == pytest.approx((656 + 63 * 16) / 1e6)


def test_prefill_is_bound_by_arithmetic():
    # 1000 tokens of one prompt: 2 x 288 each, one row of logits, 500,500 pairs of 2 products of
    # 2 x 2 features in 2 heads of 2 layers.
    flops = 1000 * 576 + 80 + 4 * 2 * 2 * 2 * 500_500
    slow = dataclasses.replace(GPU_BY_HAND, bf16_flops=1e6, fp8_flops=2e6)
    load = StepLoad(1000, 1, 500_500, 1000)
    settings = {"compute_efficiency": 1.0, "step_overhead_seconds": 0.0}
    assert Roofline(slow, MODEL_BY_HAND, **settings).step_seconds(load) == pytest.approx(
        flops / 1e6
    )
    fast = Roofline(slow, MODEL_BY_HAND, weight_dtype="fp8", **settings)
    assert fast.step_seconds(load) == pytest.approx(flops / 2e6)


def test_chunk_without_a_sample_reads_no_head():
    with_sample = by_hand().step_seconds(StepLoad(1, 1, 1, 1))
    without = by_hand().step_seconds(StepLoad(1, 0, 1, 1))
    assert with_sample - without == pytest.approx(2 * 40 / 1e6)


def test_smaller_types_are_read_faster():
    load = StepLoad(1, 1, 100, 100)
    assert by_hand(weight_dtype="fp8").step_seconds(load) == pytest.approx((328 + 101 * 16) / 1e6)
    assert by_hand(kv_cache_dtype="fp8").step_seconds(load) == pytest.approx((656 + 101 * 8) / 1e6)


def test_efficiencies_and_overhead_enter_as_stated():
    load = StepLoad(1, 1, 100, 100)
    seconds = by_hand(memory_efficiency=0.5, step_overhead_seconds=7.0).step_seconds(load)
    assert seconds == pytest.approx(7 + 2 * (656 + 101 * 16) / 1e6)


def test_experts_are_read_once_some_token_chose_them():
    # Two layers of 4 experts of 3 x 4 x 8, one per token; routers of 4 x 4; attention 48 each.
    mixture = dataclasses.replace(MODEL_BY_HAND, experts=ExpertsConfig(4, 1, 8))
    exact = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "step_overhead_seconds": 0.0}
    roofline = Roofline(GPU_BY_HAND, mixture, **exact)
    one = roofline.step_work(StepLoad(1, 0, 1, 1))
    assert one.weight_bytes == 2 * 2 * (48 + 16 + 96)
    assert one.flops == 2 * 2 * (48 + 16 + 96) + 4 * 2 * 2 * 2
    # Two tokens choose the same expert once in four times.
    two = roofline.step_work(StepLoad(2, 0, 3, 2))
    assert two.weight_bytes == 2 * 2 * (48 + 16 + 1.75 * 96)


def test_weights_as_they_are_stored_take_the_place_of_a_type():
    # Read: layers, the head where a row is sampled; not the embedding. Products have 16 bits.
    stored = WeightBytes(layers=300, experts=0, head=50, embedding=1000)
    roofline = by_hand(weights=stored)
    assert roofline.step_seconds(StepLoad(1, 1, 1, 1)) == pytest.approx((350 + 2 * 16) / 1e6)
    assert roofline.step_work(StepLoad(1, 0, 1, 1)).weight_bytes == 300
    with pytest.raises(ValueError, match="weight_dtype='fp8' contradicts weights"):
        by_hand(weights=stored, weight_dtype="fp8")


def test_tensor_parallelism_divides_the_work_and_adds_reductions():
    # Two GPUs share the weights; the only kv head is on both, so each reads the whole cache.
    # Two reductions per layer of 5 tokens x 4 x 2 bytes, once around a ring of two.
    seconds = by_hand(tensor_parallel_size=2).step_seconds(StepLoad(5, 5, 500, 500))
    assert seconds == pytest.approx((656 / 2 + 505 * 16) / 1e6 + 4 * 40 / 1e3)


def test_blocks_fill_the_memory_beside_weights_and_activations():
    roofline = by_hand(step_overhead_seconds=0.001)
    weights = 2 * model_size(MODEL_BY_HAND).total
    # 32 rows of 4 x 4 + 2 x 8 in 2 bytes, and 4 rows of 10 logits in 4 bytes.
    activations = 32 * 32 * 2 + 4 * 10 * 4
    blocks = roofline.num_blocks(
        16, gpu_memory_utilization=0.5, max_num_batched_tokens=32, max_num_seqs=4
    )
    assert blocks == (500_000_000 - weights - activations) // (16 * 16)


def test_llama_8b_on_an_h100_is_in_the_range_that_engines_report():
    roofline = Roofline(find_gpu("h100"), find_model("llama-3.1-8b"))
    # 16 GB of weights leave 50 to 60 GB: 400,000 to 460,000 tokens of 128 KiB.
    assert 25_000 < roofline.num_blocks(16) < 29_500
    # 16 GB at 3.35 TB/s are 4.8 ms at best.
    assert 0.0048 < roofline.step_seconds(StepLoad(1, 1, 1000, 1000)) < 0.008


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(CapacityError, match="No available memory for the cache blocks"):
        Roofline(find_gpu("h100"), find_model("llama-3.1-70b")).num_blocks()
    roofline = Roofline(find_gpu("h100"), find_model("llama-3.1-70b"), tensor_parallel_size=4)
    assert roofline.num_blocks() > 10_000
    assert roofline.name == "4 x h100"


def test_names_of_gpus_are_read_loosely():
    assert find_gpu("RTX 4090") is find_gpu("rtx_4090") is GPUS["rtx-4090"]
    with pytest.raises(ValueError, match="gpu='abacus' is unknown; known are a100-40gb, a100"):
        find_gpu("abacus")


def test_model_is_read_from_a_config_file(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "intermediate_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
        "vocab_size": 10, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert model_size(find_model(str(path))) == model_size(MODEL_BY_HAND)
    with pytest.raises(ValueError, match="model='gpt-9' is neither a file or folder nor one of"):
        find_model("gpt-9")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_dtype": "int3"}, "weight_dtype='int3' must be bfloat16 or fp8"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3' must be bfloat16 or fp8"),
        ({"compute_efficiency": 0.0}, r"compute_efficiency=0.0 must be in \(0, 1\]"),
        ({"memory_efficiency": 1.5}, r"memory_efficiency=1.5 must be in \(0, 1\]"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 must divide the 2 q heads"),
    ],
)
def test_impossible_device_is_refused(settings, message: str):
    with pytest.raises(ValueError, match=message):
        by_hand(**settings)


def test_hits_save_the_time_of_their_prefill():
    cost = Roofline(find_gpu("h100"), find_model("llama-3.1-8b"))
    config = SimulationConfig(4000, concurrency=1)
    cold = simulate(cyclic(passes=1), config, cost)
    both = simulate(cyclic(passes=2), config, cost)
    assert cold.device == "h100"
    # 5,033 tokens are 85 ms at least at the full peak of 989 TFLOP/s; the 9 that are left, one
    # reading of the weights.
    assert cold.latency("ttft").p50 > 0.08
    assert both.duration_seconds - cold.duration_seconds < 10 * 0.01
