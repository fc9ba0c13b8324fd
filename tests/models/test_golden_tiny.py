"""Tiny random models give the logits and greedy tokens that transformers gives.

Two prompts share every batch: their blocks are shuffled, their prompts are cut into chunks of
different sizes, and they decode together, so the paged path is what is compared.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model
from paged.models.linear_packing import pack_linear_layers
from paged.models.weights import SafetensorsSource, load_params
from tests.models.helpers import PagedModel, prefill_in_chunks

MODELS = (
    "gemma2",
    "gemma3_text",
    "llama",
    "llama3_rope",
    "mistral",
    "olmo2",
    "phi3",
    "phi3_partial_rope",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
)
CHUNK_SIZES = {0: 5, 1: 16}
# Below this gap two ways to add up the same float32 numbers may choose different tokens.
NEAR_TIE = 1e-3


def load_golden(
    data_dir: Path, name: str, dtype: str, backend: str
) -> tuple[PagedModel, dict[int, dict[str, Any]]]:
    """The model with an empty cache, and the cases by sequence number."""
    folder = data_dir / "golden" / "tiny" / name
    # The classic form of the config means the same: test_config.py.
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    params = load_params(config, SafetensorsSource(folder), dtype=dtype, progress=False)
    if backend == "native":
        graphdef, _ = abstract_model(config, dtype=dtype)
        params = pack_linear_layers(graphdef, params, progress=False)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    model = PagedModel(config, params, dtype=dtype, attention_backend=backend)
    return model, dict(enumerate(cases))


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """Of attention and linear layers."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_and_greedy_tokens_equal_the_reference(
    data_dir: Path, name: str, backend: str
) -> None:
    model, cases = load_golden(data_dir, name, "float32", backend)
    prompts = {i: case["prompt_ids"] for i, case in cases.items()}
    logits = prefill_in_chunks(model, prompts, CHUNK_SIZES)
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


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_stay_within_rounding_of_the_reference(
    data_dir: Path, name: str, backend: str
) -> None:
    model, cases = load_golden(data_dir, name, "bfloat16", backend)
    prompts = {i: case["prompt_ids"] for i, case in cases.items()}
    logits = prefill_in_chunks(model, prompts, CHUNK_SIZES)
    errors = np.concatenate([np.abs(logits[i] - case["logits"]) for i, case in cases.items()])
    # transformers in bfloat16 is off by up to 0.43, on average 0.046.
    assert errors.max() < 0.6
    assert errors.mean() < 0.06
