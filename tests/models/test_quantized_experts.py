"""Experts in fewer bits give the logits of the weights that they stand for.

Tiny mixtures are quantised here, code by code, into the tensors of each format; a second checkpoint
has what those stand for, in full.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model, dense_logits
from paged.models.linear_packing import pack_linear_layers
from paged.models.moe import ExpertLinear, Experts
from paged.models.moe_config import ExpertsConfig
from paged.models.quantized.block_float8_weight import BlockFloat8Form
from paged.models.quantized.form import WeightForm, store
from paged.models.quantized.grouped_weight import GroupedForm
from paged.models.quantized.stacked_form import StackedForm
from paged.models.stored_weight import values_of
from paged.models.tensor_parallel import TensorParallel
from paged.models.weights import SafetensorsSource, load_params
from paged.native.expert_linear import are_packed_experts
from paged.sharding import ShardingRules, tensor_parallel_mesh
from tests.models.helpers import PagedModel, prefill_in_chunks
from tests.models.quantized.test_schemes import packed_along

type Quantised = tuple[dict[str, np.ndarray], np.ndarray]
"""Tensors of a layer, and the weight that they stand for."""

GROUP_SIZE = 32


def rounded(weight: np.ndarray, *, has_zeros: bool):
    """Codes [N, K], zeros and float16 scales [N, groups] of 4 bits, and the weight again."""
    grouped = weight.reshape(len(weight), -1, GROUP_SIZE)
    low, high = np.minimum(grouped.min(2), 0), grouped.max(2)
    if has_zeros:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales), 0, 15)
    else:
        scales = (np.abs(grouped).max(2) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8, np.float32)
    codes = np.clip(np.round(grouped / scales[..., None]) + zeros[..., None], 0, 15)
    back = ((codes - zeros[..., None]) * scales[..., None]).astype(np.float32)
    return codes.reshape(weight.shape).astype(int), zeros.astype(int), scales, back


def awq(weight: np.ndarray) -> Quantised:
    codes, zeros, scales, back = rounded(weight, has_zeros=True)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    eights = [8 * word + column for word in range(len(weight) // 8) for column in order]
    tensors = {
        "qweight": packed_along(codes.T[:, eights], 4, 1),
        "qzeros": packed_along(zeros.T[:, eights], 4, 1),
        "scales": scales.T,
    }
    return tensors, back.reshape(weight.shape)


def gptq(weight: np.ndarray, *, is_act_order: bool = False) -> Quantised:
    num_inputs = weight.shape[1]
    order = np.arange(num_inputs)
    if is_act_order:
        order = np.random.default_rng(num_inputs).permutation(num_inputs)
    codes, zeros, scales, back = rounded(weight[:, order], has_zeros=False)
    in_place, groups, again = codes.copy(), np.zeros(num_inputs, np.int32), back.copy()
    in_place[:, order] = codes
    groups[order] = np.arange(num_inputs) // GROUP_SIZE
    again = again.reshape(weight.shape)
    restored = np.empty_like(again)
    restored[:, order] = again
    tensors = {
        "qweight": packed_along(in_place.T, 4, 0),
        "qzeros": packed_along(zeros.T - 1, 4, 1),
        "scales": scales.T,
        "g_idx": groups,
    }
    return tensors, restored


def packed(weight: np.ndarray) -> Quantised:
    codes, _, scales, back = rounded(weight, has_zeros=False)
    tensors = {
        "weight_packed": packed_along(codes, 4, 1),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape),
    }
    return tensors, back.reshape(weight.shape)


def float8(weight: np.ndarray) -> Quantised:
    scale = np.abs(weight).max() / 448
    values = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": np.float32(scale)}
    return tensors, values.astype(np.float32) * np.float32(scale)


def float8_blocks(weight: np.ndarray, num_inputs: int = GROUP_SIZE) -> Quantised:
    """Blocks of 48 outputs, of which the last is cut short, and of some inputs."""
    scales = np.zeros((-(-len(weight) // 48), weight.shape[1] // num_inputs), np.float32)
    values, back = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(weight)
    for i, j in np.ndindex(scales.shape):
        block = (slice(48 * i, 48 * (i + 1)), slice(num_inputs * j, num_inputs * (j + 1)))
        scales[i, j] = np.abs(weight[block]).max() / 448
        values[block] = weight[block] / scales[i, j]
        back[block] = values[block].astype(np.float32) * scales[i, j]
    return {"weight": values, "weight_scale": scales}, back


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP_SIZE}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [48, GROUP_SIZE]}
# The small one has attention outputs that are no multiple of 32.
SMALL_BLOCKS = BLOCKS | {"block_structure": [48, 16]}


def compressed(weights: dict[str, Any], layout: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*gate$"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Quantised]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE}, awq),
    "gptq": (GPTQ | {"desc_act": False, "dynamic": {r"-:.*\.gate$": {}}}, gptq),
    "gptq_act_order": (GPTQ | {"desc_act": True}, functools.partial(gptq, is_act_order=True)),
    "w4a16": (compressed(INT4, "pack-quantized"), packed),
    "float8": (compressed(FLOAT8, "float-quantized"), float8),
    "float8_blocks": (compressed(BLOCKS, "float-quantized"), float8_blocks),
    "float8_small_blocks": (
        compressed(SMALL_BLOCKS, "float-quantized"),
        functools.partial(float8_blocks, num_inputs=16),
    ),
}


def is_quantised(name: str) -> bool:
    return name.endswith(("proj.weight", "proj_with_mqa.weight")) or ".experts." in name


@pytest.fixture
def checkpoints(data_dir: Path, tmp_path: Path):
    """Makes a mixture in some format, and the one that it stands for: configs and folders."""

    def make(name: str, layout: str) -> list[tuple[ModelConfig, Path]]:
        folder = data_dir / "golden/tiny" / name
        fields, quantise = FORMATS[layout]
        small: dict[str, np.ndarray] = {}
        full: dict[str, np.ndarray] = {}
        for tensor, values in load_file(folder / "model.safetensors").items():
            wide = np.asarray(values, np.float32)
            if is_quantised(tensor):
                parts, wide = quantise(wide)
                module = tensor.removesuffix(".weight")
                small |= {f"{module}.{part}": np.ascontiguousarray(v) for part, v in parts.items()}
            else:
                small[tensor] = wide
            full[tensor] = wide
        raw = json.loads((folder / "config.json").read_text())
        made = []
        for kind, tensors, extra in (
            ("small", small, {"quantization_config": fields}),
            ("full", full, {}),
        ):
            (tmp_path / kind).mkdir()
            save_file(tensors, tmp_path / kind / "model.safetensors")
            made.append((ModelConfig.from_hf(raw | extra), tmp_path / kind))
        return made

    return make


PROMPT = np.random.default_rng(0).integers(3, 256, (2, 24)).astype(np.int32)


def logits_of(
    config: ModelConfig, folder: Path, dtype: str = "float32", *, is_packed: bool = False
) -> np.ndarray:
    params = load_params(config, SafetensorsSource(folder), dtype=dtype, progress=False)
    graphdef, _ = abstract_model(config, dtype=dtype)
    if is_packed:
        params = pack_linear_layers(graphdef, params, progress=False)
        model = nnx.merge(graphdef, params)
        experts = [m for _, m in nnx.iter_modules(model) if isinstance(m, ExpertLinear)]
        assert {layer.can_pack for layer in experts} == {
            are_packed_experts(values_of(layer.weight)[...]) for layer in experts
        }
    return np.asarray(jax.jit(dense_logits, static_argnums=0)(graphdef, params, PROMPT))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "gptq"),
        ("mixtral", "gptq_act_order"),
        ("mixtral", "w4a16"),
        ("mixtral", "float8"),
        ("qwen3_moe", "float8_blocks"),
        ("deepseek_v3_plain", "float8_small_blocks"),
    ],
)
def test_logits_are_those_of_the_weights_in_full(checkpoints, name: str, layout: str):
    small, full = checkpoints(name, layout)
    expected = logits_of(*full)
    np.testing.assert_allclose(logits_of(*small), expected, atol=2e-4, rtol=1e-4)
    _, state = abstract_model(small[0], dtype="float32")
    stored = {
        str(leaf.dtype)
        for path, leaf in nnx.to_flat_state(state)
        if "experts" in path and path[-1] == "values"
    }
    assert stored == {"float8_e4m3fn" if layout == "float8" else "uint8"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", "awq"),
        ("mixtral", "gptq"),
        ("mixtral", "gptq_act_order"),  # the only one whose experts cannot be packed
        ("mixtral", "float8"),
    ],
)
def test_native_kernels_give_the_logits_of_the_weights_in_full(
    native, checkpoints, name: str, layout: str
):
    small, full = checkpoints(name, layout)
    got = logits_of(*small, is_packed=True)
    np.testing.assert_allclose(got, logits_of(*full), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "rules"),
    [
        ("w4a16", ShardingRules(experts="tp")),
        pytest.param("awq", ShardingRules(), marks=pytest.mark.slow),
        pytest.param("float8_blocks", ShardingRules(), marks=pytest.mark.slow),
        pytest.param("float8_blocks", ShardingRules(experts="tp"), marks=pytest.mark.slow),
    ],
)
def test_two_devices_give_the_logits_of_one(checkpoints, layout: str, rules: ShardingRules):
    (config, folder), _ = checkpoints("mixtral", layout)
    expected = logits_of(config, folder)
    split, mesh = TensorParallel(config, 2, rules), tensor_parallel_mesh(2)
    params = load_params(
        config,
        SafetensorsSource(folder),
        dtype="float32",
        shardings=split.param_shardings(mesh, dtype="float32"),
        progress=False,
    )
    model = PagedModel(config, params, dtype="float32", mesh=mesh, rules=rules)
    got = prefill_in_chunks(model, dict(enumerate(PROMPT.tolist())), {0: 5, 1: 16})
    for row, logits in enumerate(expected):
        np.testing.assert_allclose(got[row], logits, atol=2e-4, rtol=1e-4)


def test_groups_that_features_of_experts_cannot_share_are_refused(checkpoints):
    (config, _), _ = checkpoints("qwen3_moe", "awq")
    split = TensorParallel(config, 2)
    with pytest.raises(ValueError, match=r"experts\.down_proj .*: the 16 .* Use enable_expert_p"):
        split.check_quantized_weights(None)
    TensorParallel(config, 2, ShardingRules(experts="tp")).check_quantized_weights(None)


def test_a_tensor_that_one_expert_lacks_is_named(checkpoints):
    (config, folder), _ = checkpoints("mixtral", "awq")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    missing = "model.layers.1.block_sparse_moe.experts.2.w3.qzeros"
    del tensors[missing]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"missing: {missing}"):
        load_params(config, SafetensorsSource(folder), dtype="float32", progress=False)


def test_biases_of_experts_must_be_zero_where_the_model_has_none(checkpoints):
    (config, folder), _ = checkpoints("mixtral", "gptq")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for value in (0, 1):
        for layer in range(2):
            for expert in range(4):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.bias"
                tensors[name] = np.full(64, value, np.float16)
        save_file(tensors, path)
        source = SafetensorsSource(folder)
        if not value:
            load_params(config, source, dtype="float32", progress=False)
            continue
        with pytest.raises(CheckpointError, match=r"tensor .*experts\.w2\.bias is not zero"):
            load_params(config, source, dtype="float32", progress=False)


def test_experts_take_the_memory_of_their_codes(checkpoints):
    (config, _), _ = checkpoints("mixtral", "awq")
    _, state = abstract_model(config, dtype="bfloat16")
    weights = sum(
        leaf.size * jnp.dtype(leaf.dtype).itemsize
        for path, leaf in nnx.to_flat_state(state)
        if "experts" in path
    )
    experts = 2 * 4 * 3 * 64 * 64
    assert weights == experts / 2 + experts / GROUP_SIZE * 5  # codes; a scale and a zero point


@pytest.mark.parametrize(
    "form",
    [GroupedForm(4, 128, has_zeros=True), BlockFloat8Form(128, rounds_activations=True)],
    ids=lambda form: type(form).__name__,
)
def test_no_stack_is_copied_or_widened_as_a_whole(form: WeightForm):
    experts = Experts(256, ExpertsConfig(64, 4, 256), dtype="bfloat16", rngs=nnx.Rngs(0))
    for layer in (experts.gate_proj, experts.up_proj, experts.down_proj):
        layer.weight = store(layer.weight, StackedForm(form), 2)

    @jax.jit
    def run(experts, rows, chosen, scales, num_rows):
        return experts(rows, chosen, scales, num_rows)

    rows, chosen = jnp.zeros((8, 256), jnp.bfloat16), jnp.zeros((8, 4), jnp.int32)
    arguments = (experts, rows, chosen, jnp.zeros((8, 4)), jnp.array([8], jnp.int32))
    memory = run.lower(*arguments).compile().memory_analysis()
    one_stack = experts.up_proj.weight.values[...].nbytes
    assert memory.temp_size_in_bytes < one_stack / 2
