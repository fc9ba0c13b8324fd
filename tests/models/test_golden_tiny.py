"""Tiny random models give the logits and greedy tokens that transformers gives.

Two prompts share every batch: their blocks are shuffled, their prompts are cut into chunks of
different sizes, and they decode together, so the paged path is what is compared.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model
from paged.models.linear_packing import pack_linear_layers
from paged.models.tensor_parallel import TensorParallel
from paged.models.weights import SafetensorsSource, load_params
from paged.sharding import ShardingRules, tensor_parallel_mesh
from tests.models.helpers import RULES, PagedModel, prefill_in_chunks

MODELS = (
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
    "qwen2",
    "qwen2_yarn",
    "qwen3",
)
LATENT_MODELS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_plain")
EXPERT_MODELS = (*LATENT_MODELS, "gpt_oss", "gpt_oss_mxfp4", "mixtral", "qwen3_moe")
BY_EXPERT = ShardingRules(experts="tp")
CHUNK_SIZES = {0: 5, 1: 16}
# What transformers in bfloat16 is off by, at most and on average, if more than (0.43, 0.046).
# The context of the longrope golden is stretched 64 times, which triples its attention logits.
BFLOAT16_ERRORS = {"phi3_longrope": (0.80, 0.073)}
# Below this gap two ways to add up the same float32 numbers may choose different tokens.
NEAR_TIE = 1e-3


def load_golden(
    data_dir: Path,
    name: str,
    dtype: str,
    backend: str,
    num_devices: int = 1,
    rules: ShardingRules = RULES,
) -> tuple[PagedModel, dict[int, dict[str, Any]]]:
    """The model with an empty cache, and the cases by sequence number."""
    folder = data_dir / "golden" / "tiny" / name
    # The classic form of the config means the same: test_config.py.
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    split = TensorParallel(config, num_devices, rules)
    mesh = None if num_devices == 1 else tensor_parallel_mesh(num_devices)
    params = load_params(
        config,
        SafetensorsSource(folder),
        dtype=dtype,
        shardings=mesh and split.param_shardings(mesh, dtype=dtype),
        kv_head_copies=split.kv_head_copies,
        progress=False,
    )
    if backend == "native":
        graphdef, _ = abstract_model(config, dtype=dtype)
        params = pack_linear_layers(graphdef, params, progress=False)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    model = PagedModel(
        config, params, dtype=dtype, attention_backend=backend, mesh=mesh, rules=rules
    )
    return model, dict(enumerate(cases))


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """Of attention and linear layers."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


@pytest.mark.parametrize("name", [*MODELS, *EXPERT_MODELS])
def test_float32_logits_and_greedy_tokens_equal_the_reference(
    data_dir: Path, name: str, backend: str
) -> None:
    check_float32(*load_golden(data_dir, name, "float32", backend))


# With two kv heads, two devices have one each, and of four, two have the same. These have two query
# heads, and no four devices can have one of them each.
TWO_Q_HEADS = ("olmo2", "phi3", "phi3_partial_rope", "qwen2", "qwen2_yarn")
SPLITS = [
    (name, n, RULES)
    for name in [*MODELS, *EXPERT_MODELS]
    for n in (2, 4)
    # 64 features of an MXFP4 expert are two groups.
    if n == 2 or name not in (*TWO_Q_HEADS, "gpt_oss_mxfp4")
] + [(name, n, BY_EXPERT) for name in EXPERT_MODELS for n in (2, 4)]
# Copies of kv heads, norms over all heads, head norms, experts, latent vectors; the others are
# combinations.
QUICK_SPLITS = (
    ("llama", 4, RULES),
    ("olmo2", 2, RULES),
    ("gemma3_text", 4, RULES),
    ("mixtral", 2, RULES),
    ("qwen3_moe", 4, BY_EXPERT),
    ("deepseek_v3", 4, RULES),
)


@pytest.mark.parametrize(
    ("name", "num_devices", "rules"),
    [
        pytest.param(*split, marks=[] if split in QUICK_SPLITS else pytest.mark.slow)
        for split in SPLITS
    ],
)
def test_several_devices_give_the_same(
    data_dir: Path, name: str, num_devices: int, rules: ShardingRules
) -> None:
    check_float32(*load_golden(data_dir, name, "float32", "xla", num_devices, rules))


def check_float32(
    model: PagedModel,
    cases: dict[int, dict[str, Any]],
    chunk_sizes: Mapping[int, int] = CHUNK_SIZES,
) -> None:
    prompts = {i: case["prompt_ids"] for i, case in cases.items()}
    logits = prefill_in_chunks(model, prompts, chunk_sizes)
    for i, case in cases.items():
        # 3.5e-5 is the largest difference seen between independent float32 implementations.
        np.testing.assert_allclose(logits[i], case["logits"], atol=1e-4, rtol=1e-5)

    last = {i: logits[i][-1] for i in cases}
    num_compared = 0
    for step in range(len(cases[0]["greedy_ids"])):
        for i, case in cases.items():
            if min(case["greedy_gaps"][: step + 1]) > NEAR_TIE:
                assert last[i].argmax() == case["greedy_ids"][step], (i, step)
                num_compared += 1
        # Fed the reference's token, so that a near tie does not end the comparison.
        step_logits = model.logits({i: [case["greedy_ids"][step]] for i, case in cases.items()})
        last = {i: step_logits[i][-1] for i in cases}
    assert num_compared >= 16


# Slow are those that differ from others only in what float32 or the native kernels show as well.
QUICK_IN_XLA_BFLOAT16 = ("gemma3_text", "granite", "llama", "phi3_longrope", "qwen3")
QUICK_IN_XLA_BFLOAT16 += ("deepseek_v3", "gpt_oss", "qwen3_moe")
SLOW_IN_BFLOAT16 = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3_plain")


def in_bfloat16(names: Iterable[str]) -> pytest.MarkDecorator:
    """A test of these models on both backends, all of them in the slow tests."""
    quick = {
        "xla": set(QUICK_IN_XLA_BFLOAT16),
        "native": set(names) - set(SLOW_IN_BFLOAT16),
    }
    params = [
        pytest.param(backend, name, marks=[] if name in quick[backend] else pytest.mark.slow)
        for backend in quick
        for name in names
    ]
    return pytest.mark.parametrize(("backend", "name"), params, indirect=["backend"])


@in_bfloat16(MODELS)
def test_bfloat16_logits_stay_within_rounding_of_the_reference(
    data_dir: Path, name: str, backend: str
) -> None:
    model, cases = load_golden(data_dir, name, "bfloat16", backend)
    prompts = {i: case["prompt_ids"] for i, case in cases.items()}
    logits = prefill_in_chunks(model, prompts, CHUNK_SIZES)
    errors = np.concatenate([np.abs(logits[i] - case["logits"]) for i, case in cases.items()])
    largest, mean = BFLOAT16_ERRORS.get(name, (0.43, 0.046))
    assert errors.max() < 1.4 * largest
    assert errors.mean() < 1.3 * mean


@in_bfloat16(EXPERT_MODELS)
def test_bfloat16_logits_of_experts_are_near_the_reference_on_average(
    data_dir: Path, name: str, backend: str
) -> None:
    model, cases = load_golden(data_dir, name, "bfloat16", backend)
    prompts = {i: case["prompt_ids"] for i, case in cases.items()}
    logits = prefill_in_chunks(model, prompts, CHUNK_SIZES)
    errors = np.concatenate([np.abs(logits[i] - case["logits"]) for i, case in cases.items()])
    # Of the largest nothing is known: a near tie of the router may choose another expert, which
    # moves logits of transformers, too, by up to 2.8.
    assert errors.mean() < 0.15
