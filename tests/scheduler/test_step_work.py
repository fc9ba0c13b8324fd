"""What steps compute and move, against sums over all tokens and layers."""

import dataclasses

import pytest

from paged.models.config import ModelConfig
from paged.models.model_size import model_size
from paged.models.moe_config import ExpertsConfig
from paged.models.weight_bytes import WeightBytes
from paged.scheduler.output import DeviceWork, ScheduledRequest, SchedulerOutput
from paged.scheduler.step_rows import StepRows
from paged.scheduler.step_work import StepWorkEstimate, attended_pairs, read_tokens
from tests.scheduler.stepping import make_request

# D 4, MLP 8, 2 layers, 2 q heads, 1 kv head of 2, vocabulary 10: 144 weights a layer, head 40.
MODEL = ModelConfig(
    "LlamaForCausalLM", 10, 4, 8, 2, 2, 1, 2, max_position_embeddings=64, rms_norm_eps=1e-5
)
WEIGHTS = WeightBytes(layers=576, experts=0, head=80, embedding=80)
KV_TOKEN_BYTES = 2 * 2 * 1 * 2 * 2
# A chunk that does not end its prompt, a chunk that does, a decode.
ROWS = [(0, 3, False), (5, 4, True), (20, 1, True)]


def step(rows=ROWS) -> SchedulerOutput:
    scheduled = [
        ScheduledRequest(make_request(str(i), 40), start, count, samples)
        for i, (start, count, samples) in enumerate(rows)
    ]
    return SchedulerOutput(scheduled, sum(count for _, count, _ in rows))


def seen(position: int, window: int | None) -> range:
    """Positions that a token attends to."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("start", "count", "_samples"), ROWS)
def test_pairs_and_reads_of_a_row(window, start, count, _samples):
    rows = [seen(position, window) for position in range(start, start + count)]
    assert attended_pairs(start, count, window) == sum(map(len, rows))
    assert read_tokens(start, count, window) == len(set().union(*rows))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_work_of_a_step(num_devices):
    estimate = StepWorkEstimate(MODEL, WEIGHTS, KV_TOKEN_BYTES, num_devices)
    pairs = (1 + 2 + 3) + (6 + 7 + 8 + 9) + 21
    # 2 for multiply and add; attention has two products of 2 features in 2 heads of 2 layers.
    flops = 8 * 2 * 288 + 2 * 2 * 40 + 2 * 2 * 2 * 2 * 2 * pairs
    read = 576 + 80 + (3 + 9 + 21) * KV_TOKEN_BYTES
    assert estimate(step()) == DeviceWork(flops // num_devices, read, 8 * KV_TOKEN_BYTES)


def test_chunk_without_a_sample_needs_no_head_and_no_step_no_work():
    estimate = StepWorkEstimate(MODEL, WEIGHTS, KV_TOKEN_BYTES)
    work = estimate(step(ROWS[:1]))
    assert work == DeviceWork(3 * 576 + 16 * 2 * 6, 576 + 3 * KV_TOKEN_BYTES, 3 * KV_TOKEN_BYTES)
    assert estimate(step([])) == DeviceWork()


def test_layers_with_windows_attend_to_less():
    windowed = dataclasses.replace(MODEL, layer_windows=(None, 4))
    load = StepWorkEstimate(windowed, WEIGHTS, KV_TOKEN_BYTES).load_of
    pairs = (6 + (6 + 7 + 8 + 9) + 21, 6 + 4 * 4 + 4)
    read = (3 + 9 + 21, 3 + 7 + 4)
    got = load(StepRows.of(step().scheduled))
    assert got.attended_pairs == round(sum(pairs) / 2)
    assert got.context_tokens == round(sum(read) / 2)


def test_experts_that_nobody_chose_are_not_read():
    mixture = dataclasses.replace(MODEL, experts=ExpertsConfig(4, 1, 8))
    weights = WeightBytes(layers=100, experts=4000, head=10, embedding=0)
    work = StepWorkEstimate(mixture, weights, KV_TOKEN_BYTES)(step([(0, 1, False)]))
    assert work.read_bytes == 100 + 1000 + KV_TOKEN_BYTES
    assert work.flops == 2 * model_size(mixture).layer_matmul + 16 * 2
