"""Mixtures of experts from GGUF: tensors and configs are those of the checkpoints, and logits."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paged.models.config import ModelConfig
from paged.models.errors import UnsupportedModelError
from paged.models.forward import abstract_model, dense_logits
from paged.models.gguf_config import gguf_hf_config, gguf_model_config
from paged.models.gguf_file import GGUFFile
from paged.models.gguf_source import GGUFSource
from paged.models.mxfp4_weight import widen
from paged.models.registry import ARCHITECTURES
from paged.models.weights import SafetensorsSource, load_params
from tests.models.gguf_writing import Kind, convert_to_gguf

NAMES = ("mixtral", "qwen3_moe", "gpt_oss", "gpt_oss_mxfp4")


@pytest.fixture
def convert(data_dir: Path, tmp_path: Path):
    """Converts a tiny mixture to GGUF; one that has MXFP4 keeps it."""

    def make(name: str, **options: Any) -> GGUFFile:
        tiny = data_dir / "golden/tiny"
        if name.endswith("mxfp4"):
            options = {"experts_kind": Kind.MXFP4} | options
        path = tmp_path / f"{name}.gguf"
        return GGUFFile(convert_to_gguf(tiny / name, tiny / "tokenizer", path, **options))

    return make


def original(data_dir: Path, name: str) -> tuple[ModelConfig, SafetensorsSource]:
    folder = data_dir / "golden/tiny" / name
    raw = json.loads((folder / "config.json").read_text())
    return ModelConfig.from_hf(raw | {"dtype": "bfloat16"}), SafetensorsSource(folder)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), ("mixtral", {"split_experts": True})],
)
def test_tensors_and_config_equal_those_of_the_checkpoint(
    convert, data_dir: Path, name: str, options: dict[str, Any]
):
    file = convert(name, **options)
    config, source = original(data_dir, name)
    assert gguf_model_config(file) == config
    arrange = ARCHITECTURES[config.architecture].arrange
    assert arrange is not None
    sources = arrange(GGUFSource(file)), arrange(source)
    found, expected = ({tensor: part.shape(tensor) for tensor in part.names()} for part in sources)
    assert found == expected
    for tensor in expected:
        if "_scales" in tensor:
            continue  # with their blocks
        ours, theirs = (part.read(tensor) for part in sources)
        if "_blocks" in tensor:
            scales = tensor.replace("_blocks", "_scales")
            ours, theirs = (
                widen(jnp.asarray(values), jnp.asarray(part.read(scales)), jnp.dtype("float32"))
                for values, part in zip((ours, theirs), sources, strict=True)
            )
        else:
            assert ours.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), err_msg=tensor
        )


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(convert, data_dir: Path, name: str):
    file = convert(name)
    config = gguf_model_config(file)
    params = load_params(config, GGUFSource(file), dtype="float32", progress=False)
    graphdef, _ = abstract_model(config, dtype="float32")
    expected = json.loads((data_dir / "golden/tiny" / name / "expected.json").read_text())
    case = expected["cases"][0]
    logits = jax.jit(dense_logits, static_argnums=0)(
        graphdef, params, jnp.array([case["prompt_ids"]], jnp.int32)
    )
    np.testing.assert_allclose(logits[0], case["logits"], atol=1e-4, rtol=1e-5)


def test_blocks_that_not_all_experts_have_are_widened(convert):
    file = convert("gpt_oss_mxfp4", experts_kind=Kind.BF16)
    assert "quantization_config" not in gguf_hf_config(file)
    assert not gguf_model_config(file).experts.is_mxfp4
    blocks = convert("gpt_oss_mxfp4")
    plain = convert("mixtral", experts_kind=Kind.MXFP4)  # a family that does not keep them
    assert gguf_hf_config(blocks)["quantization_config"] == {"quant_method": "mxfp4"}
    source = GGUFSource(plain)
    name = "model.layers.0.block_sparse_moe.experts.w1.weight"
    assert source.read(name).dtype == ml_dtypes.bfloat16
    source.close()
    assert source.names() == []


def test_experts_of_quantised_files_are_stacks(convert, data_dir: Path):
    source = GGUFSource(convert("qwen3_moe", experts_kind=Kind.Q8_0))
    stack = source.read("model.layers.1.mlp.experts.up_proj.weight")
    assert stack.shape == (8, 32, 64)
    _, plain = original(data_dir, "qwen3_moe")
    expected = np.asarray(plain.read("model.layers.1.mlp.experts.5.up_proj.weight"), np.float32)
    assert np.abs(stack[5].astype(np.float32) - expected).max() < 0.01


@pytest.mark.parametrize("key", ["expert_shared_count", "leading_dense_block_count"])
def test_other_mixtures_are_refused(convert, key: str):
    file = convert("qwen3_moe", **{f"qwen3moe__{key}": 1})
    with pytest.raises(UnsupportedModelError, match=rf"qwen3moe\.{key}=1 is not supported"):
        gguf_model_config(file)
