"""Plans: published and hand-computed figures, memory as the engine counts it, brute force."""

import dataclasses

import pytest

from paged.models.config import ModelConfig
from paged.models.moe_config import ExpertsConfig
from paged.models.quantized.formats import read_quantization
from paged.scheduler.config import EngineConfig
from paged.scheduler.planning.advice import best_block_size
from paged.scheduler.planning.plan import GPUPlan, PlanSettings, make_plan
from paged.scheduler.planning.speed import Efficiencies, Speed
from paged.scheduler.planning.workload import Workload, decode_load, prefill_loads
from paged.scheduler.simulator.gpus import GIB, GPU, GPUS, find_gpu, gpu_of_figures
from paged.scheduler.simulator.model_presets import MODELS
from tests.models.test_model_size import DEEPSEEK_V2_LITE

EXACT = Efficiencies(1.0, 1.0, 0.0)
QWEN_7B = MODELS["qwen2.5-7b"]


def plan_for(model: ModelConfig, gpu: GPU | str, **settings) -> GPUPlan:
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    (found,) = make_plan("m", model, [gpu], PlanSettings(**settings)).gpus
    return found


def speed_of(model: ModelConfig, gpu: GPU | str, **settings) -> Speed:
    speed = plan_for(model, gpu, **settings).chosen
    assert speed is not None
    return speed


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        (MODELS["qwen2.5-1.5b"], 28),
        (QWEN_7B, 56),
        (MODELS["qwen2.5-72b"], 320),
        (dataclasses.replace(QWEN_7B, num_kv_heads=28), 392),
    ],
)
def test_bytes_per_token_are_the_published_ones(model: ModelConfig, kib: int):
    plan = make_plan("m", model, [find_gpu("h200")], PlanSettings())
    assert plan.bytes_per_token == kib * 1024
    halved = make_plan("m", model, [find_gpu("h200")], PlanSettings(kv_cache_dtype="fp8"))
    assert halved.bytes_per_token * 2 == plan.bytes_per_token


def test_ridge_points_are_the_published_ones():
    assert round(find_gpu("h100").ridge) == 295
    assert round(find_gpu("a100").ridge) == 153


def test_latent_vectors_are_counted_once_and_held_by_every_gpu():
    plan = make_plan("m", DEEPSEEK_V2_LITE, [find_gpu("h200")], PlanSettings())
    # Of each layer, (d_c + d_h^R) elements: table 1 of arXiv:2405.04434.
    assert plan.bytes_per_token == 27 * (512 + 64) * 2
    on_each = {(one.kv_name, one.spec.bytes_per_token) for one in plan.gpus[0].fits}
    assert on_each == {("bfloat16", 31_104), ("fp8", 15_552)}
    assert {one.num_gpus for one in plan.gpus[0].fits} == {1, 2, 4, 8}


def test_sizes_that_do_not_split_a_quantised_checkpoint_are_left_out():
    # 3 groups of 32 inputs for each of two devices, but not for four.
    awq = read_quantization(
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    )
    shape = {"hidden_size": 256, "intermediate_size": 192, "num_q_heads": 8, "num_kv_heads": 8}
    shape |= {"head_dim": 32, "layer_windows": ()}
    model = dataclasses.replace(QWEN_7B, quantization=awq, num_layers=2, **shape)
    assert {one.num_gpus for one in plan_for(model, "h100").fits} == {1, 2}
    with pytest.raises(ValueError, match=r"size=4 does not split .*down_proj as it"):
        plan_for(model, "h100", tensor_parallel_size=4)


def test_kv_of_a_published_context():
    plan = make_plan("m", MODELS["qwen2.5-1.5b"], [find_gpu("h100")], PlanSettings())
    assert 4864 * plan.bytes_per_token / GIB == pytest.approx(0.1299, abs=5e-5)


def test_memory_of_a_gpu_is_divided_as_by_hand():
    # Of 80 GiB 92 %: weights 2 x 7,615,616,512 bytes; activations of 8,192 tokens (MLP 3 wide,
    # stream 6 wide, 4 bytes) and 1,024 rows of logits, four times; the rest are 16-token blocks.
    gpu = gpu_of_figures(memory_gib=80, gb_per_second=1000, tflops=100)
    (first, *_) = plan_for(QWEN_7B, gpu).fits
    activations = 8192 * (3 * 18944 + 6 * 3584) * 4 + 1024 * 152064 * 16
    left = int(80 * GIB * 0.92) - 2 * 7_615_616_512 - activations
    assert first.num_blocks == left // (16 * 56 * 1024)
    assert first.requests(1280) == (first.num_blocks - 1) // 80
    assert first.weights.total == 2 * 7_615_616_512


@pytest.mark.parametrize(
    ("quantization", "share"), [("int8", 0.5), ("fp8", 0.5), ("int4", 0.25 * 1.08)]
)
def test_fewer_bits_take_their_share(quantization: str, share: float):
    full, fewer = (
        plan_for(QWEN_7B, "h100", quantization=one, tensor_parallel_size=1).fits[0].weights
        for one in (None, quantization)
    )
    assert fewer.layers / full.layers == pytest.approx(share, rel=0.02)
    assert fewer.embedding == full.embedding


def test_two_gpus_hold_half_of_everything_each():
    one, two = (plan_for(QWEN_7B, "h100", tensor_parallel_size=n).fits[0] for n in (1, 2))
    assert two.weights.total / one.weights.total == pytest.approx(0.5, rel=0.001)
    assert one.spec.bytes_per_token == 2 * two.spec.bytes_per_token
    assert two.requests(1280) > 2 * one.requests(1280)


def test_fewest_gpus_that_hold_the_model_are_chosen():
    speed = speed_of(MODELS["llama-3.1-70b"], "h100")
    assert (speed.fit.num_gpus, speed.fit.weights_name) == (2, "bfloat16")
    small = plan_for(MODELS["llama-3.1-70b"], "l4")
    assert small.chosen is not None
    # 16.4 GiB of weights each, of the 20.2 that may be used; four would need twice that.
    assert (small.chosen.fit.num_gpus, small.chosen.fit.weights_name) == (8, "bfloat16")
    four = plan_for(MODELS["llama-3.1-70b"], "l4", tensor_parallel_size=4)
    assert four.chosen is not None
    assert four.chosen.fit.weights_name == "int8"
    alone = plan_for(MODELS["llama-3.1-70b"], "l4", tensor_parallel_size=1)
    assert (alone.chosen, alone.suggestions) == (None, ())


def test_decode_of_one_reads_weights_and_context_once():
    # 2 bytes for each parameter but the embedding, which is looked up, and the last norm; 1,152
    # tokens of cache and one written.
    speed = speed_of(QWEN_7B, "h100", efficiencies=EXACT)
    read = 2 * (7_615_616_512 - 152064 * 3584 - 3584) + 1153 * 57344
    assert speed.decode(1).seconds == pytest.approx(read / 3.35e12)
    assert speed.decode(1).bound == "weights"
    assert speed.decode(speed.largest_batch).bound == "KV cache"


def test_prefill_is_bound_by_two_flops_per_parameter_and_token():
    speed = speed_of(QWEN_7B, "h100", efficiencies=EXACT)
    matmul = 7_615_616_512 - 2 * 152064 * 3584
    # 28 layers x 28 heads x 128 features, 4 FLOP for each of 1024 x 1025 / 2 pairs.
    flops = 2 * 1024 * matmul + 4 * 28 * 28 * 128 * 1024 * 1025 // 2
    assert speed.prefill(1024).seconds == pytest.approx(flops / 989.4e12, rel=0.005)
    assert speed.prefill(1024).num_tokens == 1024


@pytest.mark.parametrize("context", [64, 1024, 16384])
@pytest.mark.parametrize("gpu", ["h100", "h20"])
def test_knee_is_the_first_batch_that_a_search_finds(gpu: str, context: int):
    workload = Workload(context, 2)
    speed = speed_of(MODELS["llama-3.1-8b"], gpu, workload=workload, efficiencies=EXACT)
    figures, weights = find_gpu(gpu), speed.fit.weights
    read = weights.layers + weights.head
    matmul = 8_030_261_248 - 128256 * 4096  # norms are next to nothing

    def is_past(batch: int) -> bool:
        kv = batch * (context + 2) * 131072
        flops = batch * (2 * matmul + 4 * 32 * 32 * 128 * (context + 1))
        return kv >= read or flops / figures.bf16_flops >= (read + kv) / figures.bytes_per_second

    expected = next(batch for batch in range(1, 10_000) if is_past(batch))
    assert speed.knee().batch == pytest.approx(expected, rel=0.001, abs=1)


def test_short_contexts_end_at_arithmetic_near_the_ridge():
    speed = speed_of(QWEN_7B, "h100", workload=Workload(1, 1), efficiencies=EXACT)
    assert speed.knee().reason == "arithmetic"
    # 2 FLOP for each parameter of 2 bytes: the ridge itself, and a little for the cache.
    assert speed.knee().batch == pytest.approx(295, rel=0.02)
    longer = speed_of(QWEN_7B, "h100", workload=Workload(8192, 256), efficiencies=EXACT)
    assert (longer.knee().reason, longer.knee().arithmetic) == ("KV cache", None)


def test_sustained_rate_is_that_of_requests_one_by_one():
    speed = speed_of(QWEN_7B, "h100")
    alone = 256 / (speed.prefill().seconds + 255 * speed.decode(1).seconds)
    assert speed.output_tokens_per_second(1) == pytest.approx(alone)
    assert speed.output_tokens_per_second(64) < speed.decode(64).tokens_per_second


def test_cached_prefix_is_not_computed_again():
    plain = speed_of(QWEN_7B, "h100")
    shared = speed_of(QWEN_7B, "h100", workload=Workload(1024, 256, 1000))
    assert (shared.cached_len, shared.prefill().num_tokens) == (992, 32)
    assert shared.prefill().seconds < plain.prefill().seconds / 3


# Three layers: two with a window of 5, one that sees everything.
WINDOWED = ModelConfig(
    "Gemma2ForCausalLM", 64, 8, 16, 3, 2, 1, 4, max_position_embeddings=64, rms_norm_eps=1e-5,
    layer_windows=(5, None, 5),
)  # fmt: skip


@pytest.mark.parametrize(("start", "end", "budget"), [(0, 12, 64), (3, 12, 4), (9, 12, 2)])
def test_loads_count_pairs_within_windows(start: int, end: int, budget: int):
    loads = prefill_loads(WINDOWED, end, start=start, budget=budget)
    seen = [
        sum(min(i + 1, window or 99) for window in WINDOWED.layer_windows)
        for i in range(start, end)
    ]
    assert sum(load.attended_pairs for load in loads) == pytest.approx(sum(seen) / 3, abs=1.5)
    assert [load.num_tokens for load in loads][-1] <= budget
    assert sum(load.num_tokens for load in loads) == end - start
    assert [load.num_samples for load in loads] == [0] * (len(loads) - 1) + [1]
    assert decode_load(WINDOWED, 6, 12).context_tokens == 6 * round((5 + 12 + 5) / 3)


def test_sliding_windows_leave_room_for_more_long_requests():
    layers = tuple(4096 if i % 2 else None for i in range(32))
    llama = MODELS["llama-3.1-8b"]
    windowed = dataclasses.replace(llama, layer_windows=layers)
    workload = Workload(65536, 1024)
    full, half = (
        plan_for(model, "h100", workload=workload, tensor_parallel_size=1).fits[0]
        for model in (llama, windowed)
    )
    assert half.requests(66560) > 1.5 * full.requests(66560)


def test_mixtures_read_few_experts_for_few_requests():
    mixtral = ModelConfig(
        "MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 128,
        max_position_embeddings=32768, rms_norm_eps=1e-5, experts=ExpertsConfig(8, 2, 14336),
    )  # fmt: skip
    speed = speed_of(mixtral, "h200", efficiencies=EXACT)
    # 12.9e9 active parameters, less the embedding.
    read = 2 * (12.88e9 - 32000 * 4096) + 1153 * 131072
    assert speed.decode(1).seconds == pytest.approx(read / 4.8e12, rel=0.01)
    assert speed.decode(16).seconds > 3 * speed.decode(1).seconds  # all 46.7e9


@pytest.mark.parametrize("gpu", GPUS)
def test_suggested_flags_are_settings_that_the_engine_takes(gpu: str):
    found = plan_for(MODELS["llama-3.1-8b"], gpu, workload=Workload(2000, 500, 300))
    assert found.chosen is not None
    values = {
        one.flag.removeprefix("--").replace("-", "_"): int(one.value)
        for one in found.suggestions
        if one.value.isdigit()
    }
    config = EngineConfig(**values)
    assert config.max_num_seqs is not None
    assert config.max_num_seqs <= found.chosen.fit.requests(2500)
    assert (config.max_model_len or 2500) >= 2500
    assert all(one.reason for one in found.suggestions)


@pytest.mark.parametrize(
    ("workload", "size"),
    [
        (Workload(100, 20), 16),  # 32 would leave 16 of 120 empty
        (Workload(1000, 280), 32),  # half of 32 is 1.25 %
        (Workload(8000, 1000), 128),
        (Workload(1000, 280, 511), 16),  # 15 of the prefix and 8: best of what there is
        (Workload(8000, 1000, 4095), 64),  # 63 of the prefix and 32: 1.1 %
    ],
)
def test_block_size_follows_from_what_lies_empty(workload: Workload, size: int):
    assert best_block_size(workload) == size


def test_context_is_shortened_where_the_models_own_does_not_fit():
    found = plan_for(MODELS["llama-3.1-70b"], "h100")
    (length,) = [int(one.value) for one in found.suggestions if one.flag == "--max-model-len"]
    assert found.chosen is not None
    assert found.chosen.fit.requests(length) >= 1
    assert not found.chosen.fit.requests(length + 512)
    roomy = plan_for(QWEN_7B, "h200")
    assert "--max-model-len" not in [one.flag for one in roomy.suggestions]


def test_figures_replace_those_of_the_table():
    gpu = gpu_of_figures("l4", gb_per_second=600)
    assert (gpu.bytes_per_second, gpu.bf16_flops) == (6e11, find_gpu("l4").bf16_flops)
    own = gpu_of_figures(memory_gib=16, gb_per_second=25, tflops=0.5, link_gb_per_second=8)
    assert own == GPU("custom", 5e11, 5e11, 2.5e10, 16 * GIB, 8e9)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"memory_gib": 16.0}, "--bandwidth, --tflops missing"),
        ({"name": "abacus"}, "gpu='abacus' is unknown"),
        ({"name": "l4", "tflops": 0.0}, "--tflops=0.0 must be a number above 0"),
        ({"name": "l4", "link_gb_per_second": -1.0}, "--link-bandwidth=-1.0 must be"),
    ],
)
def test_impossible_figures_are_refused(figures, message: str):
    with pytest.raises(ValueError, match=message):
        gpu_of_figures(**figures)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workload": Workload(32000, 1000)}, "input_len \\+ output_len = 33000 exceeds the 32768"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not split"),
        ({"quantization": "awq"}, "needs a checkpoint that is quantised so"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 must be"),
        ({"efficiencies": Efficiencies(2.0)}, "compute_efficiency=2.0 must be in"),
    ],
)
def test_impossible_plans_are_refused(settings, message: str):
    with pytest.raises(ValueError, match=message):
        plan_for(QWEN_7B, "h100", **settings)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1), "input_len=0 must be at least 1"),
        ((1, 0), "output_len=0 must be at least 1"),
        ((10, 1, 10), "shared_prefix_len=10 must be at least 0 and below input_len=10"),
    ],
)
def test_impossible_workloads_are_refused(lengths, message: str):
    with pytest.raises(ValueError, match=message):
        Workload(*lengths)
