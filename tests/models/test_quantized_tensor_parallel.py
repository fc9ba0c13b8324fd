"""Quantised models on several devices choose the tokens of one, or are refused before loading."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from paged.models.config import ModelConfig
from paged.models.quantized.activations import round_to_int8
from paged.models.quantized.grouped_weight import GroupedForm
from paged.models.tensor_parallel import TensorParallel
from paged.models.weights import SafetensorsSource, load_params
from paged.sharding import tensor_parallel_mesh
from tests.models.helpers import PagedModel, prefill_in_chunks
from tests.models.test_quantized_goldens import WEIGHT_ONLY

# Its groups have inputs from everywhere.
NOT_SPLIT = "llama_gptq_desc_act"


def model_on(
    data_dir: Path, name: str, size: int, quantization: str | None = None
) -> tuple[PagedModel, list[dict[str, Any]]]:
    folder = data_dir / "golden/tiny" / name
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    split, mesh = TensorParallel(config, size), tensor_parallel_mesh(size)
    settings = {"dtype": "float32", "quantization": quantization}
    params = load_params(
        config,
        SafetensorsSource(folder),
        **settings,
        shardings=split.param_shardings(mesh, **settings),
        kv_head_copies=split.kv_head_copies,
        progress=False,
    )
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return PagedModel(config, params, **settings, mesh=mesh), cases


def greedy(model: PagedModel, cases: list[dict[str, Any]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Logits of the prompts; tokens [steps, sequences], each after the reference's tokens."""
    prompts = {i: case["prompt_ids"] for i, case in enumerate(cases)}
    logits = prefill_in_chunks(model, prompts, {0: 5, 1: 16})
    tokens = [[logits[i][-1].argmax() for i in prompts]]
    for step in range(len(cases[0]["greedy_ids"]) - 1):
        rows = model.logits({i: [cases[i]["greedy_ids"][step]] for i in prompts})
        tokens.append([rows[i][-1].argmax() for i in prompts])
    return [logits[i] for i in prompts], np.array(tokens)


# Of four devices, two have the same kv head.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama_awq", 4),
        ("llama_w8a16", 4),
        *(
            pytest.param(name, 2, marks=pytest.mark.slow)
            for name in WEIGHT_ONLY
            if name != NOT_SPLIT
        ),
    ],
)
def test_several_devices_choose_the_tokens_of_the_reference(data_dir: Path, name: str, size: int):
    model, cases = model_on(data_dir, name, size)
    logits, tokens = greedy(model, cases)
    for i, case in enumerate(cases):
        np.testing.assert_allclose(logits[i], case["logits"], atol=1e-4, rtol=1e-5)
        # Near ties are left out, as in test_golden_tiny.py.
        is_clear = np.minimum.accumulate(case["greedy_gaps"]) > 1e-3
        assert is_clear.sum() >= 8
        np.testing.assert_array_equal(tokens[is_clear, i], np.array(case["greedy_ids"])[is_clear])


@pytest.mark.parametrize(
    "name", [pytest.param("llama_fp8_tensor", marks=pytest.mark.slow), "llama_fp8_channel"]
)
def test_rows_are_rounded_by_the_largest_of_all_devices(data_dir: Path, name: str):
    model, cases = model_on(data_dir, name, 2)
    prompts = {i: case["prompt_ids"] for i, case in enumerate(cases)}
    logits = prefill_in_chunks(model, prompts, {0: 5, 1: 16})
    for i, case in enumerate(cases):
        expected = np.array(case["logits_w8a8"])
        # As on one device: a value at a rounding edge may flip one step of e4m3.
        np.testing.assert_allclose(logits[i], expected, atol=2e-3)
        second, first = np.sort(expected, axis=1)[:, -2:].T
        is_clear = first - second > 4e-3
        assert is_clear.sum() >= 8
        np.testing.assert_array_equal(
            logits[i].argmax(axis=1)[is_clear], expected.argmax(axis=1)[is_clear]
        )


def test_int8_rows_are_rounded_by_the_largest_of_all_devices():
    mesh = tensor_parallel_mesh(2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 8)), jnp.float32)
    spec = PartitionSpec(None, "tp")
    split = jax.shard_map(
        lambda x: round_to_int8(x, "tp")[0], mesh=mesh, in_specs=spec, out_specs=spec
    )
    expected = np.round(np.asarray(x) / (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)))
    np.testing.assert_array_equal(split(x), expected)


def replaced(data_dir: Path, name: str, **changes: Any) -> ModelConfig:
    raw = json.loads((data_dir / "golden/tiny" / name / "config.json").read_text())
    return ModelConfig.from_hf(raw | changes)


@pytest.mark.parametrize(
    ("name", "changes", "quantization", "message"),
    [
        (NOT_SPLIT, {}, None, r"layers\.0\..*_proj .*: its groups \(act-order\) have inputs from"),
        (
            "llama_awq",
            {"intermediate_size": 96},
            None,
            r"down_proj .*: the 48 inputs of one device are no groups of 32",
        ),
        (
            "llama",
            {"intermediate_size": 128, "hidden_size": 128},
            "int4",
            r"_proj .*: the 64 inputs of one device are no groups of 128",
        ),
    ],
)
def test_weights_that_have_no_parts_are_refused_before_they_are_read(
    data_dir: Path, name: str, changes: dict[str, Any], quantization: str | None, message: str
):
    split = TensorParallel(replaced(data_dir, name, **changes), 2)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2 does not split .*{message}"):
        split.check_quantized_weights(quantization)
    dataclasses.replace(split, size=1).check_quantized_weights(quantization)


def test_one_group_of_all_inputs_is_split_in_8_bits_only():
    assert GroupedForm(8, None, has_zeros=True).split_problem(64, 2) is None
    reason = GroupedForm(4, None, has_zeros=True).split_problem(64, 2)
    assert reason == "all inputs are one group"
