"""Parameters that are parts of each head of a tensor, of checkpoints in full and in fewer bits."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.weights import SafetensorsSource, load_params
from tests.models.array_source import ArraySource

KV_UP = "model.layers.0.self_attn.kv_b_proj"


@pytest.fixture(scope="module")
def dense(data_dir: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of one dense layer of 4 heads, with keys of 16 and values of 12."""
    folder = data_dir / "golden" / "tiny" / "deepseek_v2"
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    source = SafetensorsSource(folder)
    tensors = {name: source.read(name) for name in source.names() if "layers.1." not in name}
    return config, tensors


def up_projections(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return the loaded matrices of keys and values of each head, in the checkpoint's order."""
    model = ModelConfig.from_hf(config)
    params = load_params(model, ArraySource(tensors), dtype="float32", progress=False)
    attention = params["layers"][0]["attention"]
    parts = [np.asarray(attention[name][...]) for name in ("k_up", "v_up")]
    assert [part.shape for part in parts] == [(4, 16, 32), (4, 12, 32)]
    return np.concatenate(parts, axis=1).reshape(4 * 28, 32)


def test_parts_of_each_head_lie_side_by_side(dense):
    config, tensors = dense
    stored = tensors[f"{KV_UP}.weight"].astype(np.float32)
    np.testing.assert_array_equal(up_projections(config, tensors), stored)


def test_a_tensor_of_another_shape_is_named(dense):
    config, tensors = dense
    smaller = tensors | {f"{KV_UP}.weight": tensors[f"{KV_UP}.weight"][:96]}
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight \[96, 32\] instead of \[112, 3"):
        up_projections(config, smaller)


def in_float8(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with the weights of linear layers as AutoFP8 stores them."""
    found = {}
    for name, values in tensors.items():
        if "_proj" not in name:
            found[name] = values
            continue
        wide = values.astype(np.float32)
        scale = np.abs(wide).max() / 448
        found[name] = (wide / scale).astype(ml_dtypes.float8_e4m3fn)
        found[f"{name}_scale"] = scale.reshape(1)
    return found


FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def test_parts_of_a_tensor_in_fewer_bits_are_kept_in_full(dense):
    config, tensors = dense
    quantised = in_float8(tensors)
    expected = quantised[f"{KV_UP}.weight"].astype(np.float32) * quantised[f"{KV_UP}.weight_scale"]
    found = up_projections(config | {"quantization_config": FLOAT8}, quantised)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_its_scales_must_be_there(dense):
    config, tensors = dense
    quantised = in_float8(tensors)
    del quantised[f"{KV_UP}.weight_scale"]
    with pytest.raises(CheckpointError, match=r"missing: model.*\.kv_b_proj\.weight_scale\. F"):
        up_projections(config | {"quantization_config": FLOAT8}, quantised)


def test_a_shape_that_cannot_be_stored_so_is_refused(dense):
    config, tensors = dense
    # All linear layers but that one are in full.
    ignored = ["_a_proj", "q_b_proj", "o_proj", "mlp"]
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    awq["modules_to_not_convert"] = ignored
    with pytest.raises(UnsupportedModelError, match=r"kv_b_proj cannot be quantised as .* of 128"):
        up_projections(config | {"quantization_config": awq}, tensors)
