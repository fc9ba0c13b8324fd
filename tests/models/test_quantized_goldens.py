"""Quantised tiny models give the logits of the goldens: see test_golden_tiny.py for how."""

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

WEIGHT_ONLY = (
    "llama_awq",
    "llama_gptq_sym",
    "llama_gptq_asym",
    "llama_gptq_desc_act",
    "llama_w4a16",
    "llama_w8a16",
)
ROUNDING_ACTIVATIONS = ("llama_fp8_tensor", "llama_fp8_channel")


def logits_and_cases(
    data_dir: Path,
    name: str,
    dtype: str,
    backend: str,
    *,
    config_file: str = "config.json",
    **edit: Any,
) -> tuple[PagedModel, list[np.ndarray], list[dict[str, Any]]]:
    folder = data_dir / "golden" / "tiny" / name
    raw = json.loads((folder / config_file).read_text())
    for group in raw["quantization_config"].get("config_groups", {}).values():
        group.update(edit)
    config = ModelConfig.from_hf(raw)
    params = load_params(config, SafetensorsSource(folder), dtype=dtype, progress=False)
    if backend == "native":
        graphdef, _ = abstract_model(config, dtype=dtype)
        params = pack_linear_layers(graphdef, params, progress=False)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    model = PagedModel(config, params, dtype=dtype, attention_backend=backend)
    prompts = {i: case["prompt_ids"] for i, case in enumerate(cases)}
    logits = prefill_in_chunks(model, prompts, {0: 5, 1: 16})
    return model, [logits[i] for i in range(len(cases))], cases


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_in_fewer_bits_give_the_reference(data_dir: Path, name: str, backend: str):
    model, logits, cases = logits_and_cases(data_dir, name, "float32", backend)
    for got, case in zip(logits, cases, strict=True):
        np.testing.assert_allclose(got, case["logits"], atol=1e-4, rtol=1e-5)
    last = [rows[-1] for rows in logits]
    for step in range(len(cases[0]["greedy_ids"])):
        for i, case in enumerate(cases):
            if min(case["greedy_gaps"][: step + 1]) > 1e-3:
                assert last[i].argmax() == case["greedy_ids"][step], (i, step)
        chosen = {i: [case["greedy_ids"][step]] for i, case in enumerate(cases)}
        step_logits = model.logits(chosen)
        last = [step_logits[i][-1] for i in chosen]


@pytest.mark.parametrize("name", ROUNDING_ACTIVATIONS)
def test_activations_are_rounded_as_the_checkpoint_asks(data_dir: Path, name: str):
    _, logits, cases = logits_and_cases(data_dir, name, "float32", "xla")
    for got, case in zip(logits, cases, strict=True):
        # A value at a rounding edge may flip one step of e4m3.
        np.testing.assert_allclose(got, case["logits_w8a8"], atol=2e-3)


def test_float8_weights_alone_give_the_reference(data_dir: Path, backend: str):
    _, logits, cases = logits_and_cases(
        data_dir, "llama_fp8_channel", "float32", backend, input_activations=None
    )
    for got, case in zip(logits, cases, strict=True):
        np.testing.assert_allclose(got, case["logits"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "native") for name in WEIGHT_ONLY), ("llama_gptq_desc_act", "xla")],
)
def test_bfloat16_stays_within_rounding_of_the_reference(
    native, data_dir: Path, name: str, backend: str
):
    _, logits, cases = logits_and_cases(data_dir, name, "bfloat16", backend)
    errors = np.concatenate(
        [np.abs(got - case["logits"]) for got, case in zip(logits, cases, strict=True)]
    )
    # transformers in bfloat16 is off by up to 0.43, on average 0.046.
    assert errors.max() < 0.6
    assert errors.mean() < 0.06
