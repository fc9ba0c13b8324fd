"""LoRA adapters on the device: PEFT's logits, in batches of several adapters and of none."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.models.adapter import read_adapter
from paged.models.compilation import CompilationCounter
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model
from paged.models.layers import Linear, RMSNorm, project, project_gated
from paged.models.linear_packing import pack_linear_layers
from paged.models.lora import LayerAdapters, LoRAPair, LoRAStack, own_rows
from paged.models.lora_arrays import LoRAArrays, lora_bytes
from paged.models.lora_layers import AdaptableModel
from paged.models.tensor_parallel import TensorParallel
from paged.models.weights import SafetensorsSource, load_params
from paged.sharding import tensor_parallel_mesh
from tests.lora_files import linear_shapes, merge, write_adapter
from tests.models.helpers import RULES, PagedModel, prefill_in_chunks
from tests.models.test_golden_tiny import check_float32
from tests.models.test_layers import linear, pack_layer, random

MAX_RANK = 16
ADAPTERS = {2: "llama_lora", 1: "llama_lora_rs"}  # by slot
SLOTS = (0, 2, 1)  # of each sequence: the base model and both adapters, in one batch
CHUNK_SIZES = {0: 5, 1: 16, 2: 7}


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """Of attention and linear layers."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


def load_golden(
    data_dir: Path, dtype: str, backend: str, num_devices: int = 1
) -> tuple[PagedModel, dict[int, dict[str, Any]]]:
    """The model with both adapters, and the longer case of each, by sequence."""
    tiny = data_dir / "golden" / "tiny"
    config = ModelConfig.from_hf(json.loads((tiny / "llama" / "config.json").read_text()))
    split = TensorParallel(config, num_devices, RULES)
    mesh = None if num_devices == 1 else tensor_parallel_mesh(num_devices)
    params = load_params(
        config,
        SafetensorsSource(tiny / "llama"),
        dtype=dtype,
        shardings=mesh and split.param_shardings(mesh, dtype=dtype),
        kv_head_copies=split.kv_head_copies,
        progress=False,
    )
    if backend == "native":
        params = pack_linear_layers(abstract_model(config, dtype=dtype)[0], params, progress=False)
    adaptable = AdaptableModel.of(config)
    arrays = LoRAArrays(
        adaptable.layers,
        max_loras=2,
        max_rank=MAX_RANK,
        dtype=dtype,
        kv_head_copies=split.kv_head_copies,
        place=lambda axes: mesh and RULES.named_sharding(mesh, axes),
    )
    for slot, name in ADAPTERS.items():
        adapter = read_adapter(str(tiny / name), adaptable, max_rank=MAX_RANK, dtype=dtype)
        arrays.load(slot, adapter.layers)
    model = PagedModel(
        config,
        params,
        dtype=dtype,
        attention_backend=backend,
        mesh=mesh,
        loras=arrays.stack,
        lora_slots=SLOTS,
    )
    names = [ADAPTERS.get(slot, "llama") for slot in SLOTS]
    expected = [json.loads((tiny / name / "expected.json").read_text()) for name in names]
    return model, {i: values["cases"][1] for i, values in enumerate(expected)}


def test_float32_logits_and_greedy_tokens_equal_the_reference(data_dir, backend):
    check_float32(*load_golden(data_dir, "float32", backend), CHUNK_SIZES)


# With two kv heads, two devices have one each, and of four, two have the same.
@pytest.mark.parametrize("num_devices", [2, 4])
def test_several_devices_give_the_same(data_dir, num_devices):
    check_float32(*load_golden(data_dir, "float32", "xla", num_devices), CHUNK_SIZES)


def test_bfloat16_logits_stay_within_rounding_of_the_reference(data_dir, backend):
    model, cases = load_golden(data_dir, "bfloat16", backend)
    prompts = {i: case["prompt_ids"] for i, case in cases.items()}
    logits = prefill_in_chunks(model, prompts, CHUNK_SIZES)
    errors = np.concatenate([np.abs(logits[i] - case["logits"]) for i, case in cases.items()])
    # Merged into the weights, the larger adapter is off by at most 0.48, and by 0.058 on average.
    assert errors.max() < 1.4 * 0.48
    assert errors.mean() < 0.06


@pytest.mark.parametrize(
    ("name", "targets", "fields"),
    [
        ("phi3", "", {"rank": 4}),  # fused projections
        pytest.param(  # head norms
            "qwen3",
            "q_proj o_proj up_proj",
            {"rank": 8, "use_rslora": True},
            marks=pytest.mark.slow,
        ),
        (  # latent attention, and a shared expert
            "deepseek_v2",
            "self_attn.q_a_proj self_attn.q_b_proj self_attn.o_proj shared_experts.down_proj",
            {"rank": 4},
        ),
    ],
)
def test_an_adapter_is_as_good_as_merged(data_dir, tmp_path, name, targets, fields):
    """One program computes both: with the adapter, and with other weights and without it."""
    folder = data_dir / "golden" / "tiny" / name
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    shapes = {
        m: s for m, s in linear_shapes(folder).items() if m.endswith(tuple(targets.split(" ")))
    }
    # Logits change by 10; were it 0.1, another order of float32 sums would change some by 1e-4.
    adapter = write_adapter(tmp_path / "adapter", shapes, scale=0.03, **fields)
    merged = merge(folder, adapter, tmp_path / "merged")

    def params(source: Path) -> nnx.State:
        return load_params(config, SafetensorsSource(source), dtype="float32", progress=False)

    adaptable = AdaptableModel.of(config)
    arrays = LoRAArrays(adaptable.layers, max_loras=1, max_rank=MAX_RANK, dtype="float32")
    read = read_adapter(str(adapter), adaptable, max_rank=MAX_RANK, dtype="float32")
    assert len(read.layers) >= len(shapes) > 0
    arrays.load(1, read.layers)
    prompt = json.loads((folder / "expected.json").read_text())["cases"][1]["prompt_ids"]
    prompts, sizes = {0: prompt, 1: prompt}, {0: 16, 1: 16}
    model = PagedModel(
        config, params(folder), dtype="float32", loras=arrays.stack, lora_slots=(0, 1)
    )
    base, adapted = prefill_in_chunks(model, prompts, sizes).values()
    model.params, model.num_computed = params(merged), [0] * len(model.num_computed)
    expected, _ = prefill_in_chunks(model, prompts, sizes).values()
    np.testing.assert_allclose(adapted, expected, atol=1e-4, rtol=1e-5)
    assert np.abs(base - expected).max() > 1


def test_no_collective_is_added(data_dir):
    model, _ = load_golden(data_dir, "float32", "xla", 2)
    arguments = model.params, model.cache, model._batch({0: [5, 6]}), model.loras
    text = model._step.lower(*arguments).compile().as_text()
    # Two sums for each of two layers, and one for the embedding.
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 5


RANK, FEATURES = 3, 27


def adapters_of(layer: Linear, ids: np.ndarray) -> LayerAdapters:
    """Two random adapters for a layer of as many inputs as outputs."""
    rng = np.random.default_rng(layer.output_shape[0])
    a, b = (rng.standard_normal((2 * RANK, FEATURES)).astype(np.float32) for _ in "ab")
    pair = LoRAPair(jnp.asarray(a), jnp.asarray(b))
    return LayerAdapters(pair, own_rows(LoRAStack({"": pair}, RANK), jnp.asarray(ids)))


def delta_of(adapters: LayerAdapters, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """What the adapters add, token by token."""
    a, b = np.asarray(adapters.pair.a), np.asarray(adapters.pair.b)
    deltas = np.zeros_like(x)
    for row, slot in enumerate(ids):
        if slot:
            own = slice((slot - 1) * RANK, slot * RANK)
            deltas[row] = (x[row] @ a[own].T) @ b[own]
    return deltas


@pytest.mark.parametrize("quantization", [None, "int8", "float8"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_what_adapters_add_does_not_depend_on_how_the_weight_is_stored(
    native, quantization, is_packed
):
    ids = np.array([0, 2, 1, 2, 0], np.int32)
    x = np.asarray(random((len(ids), FEATURES), "float32", seed=1))
    gate, up = (
        linear("TD,FD->TF", {"mlp": FEATURES, "embed": FEATURES}, "float32", quantization)
        for _ in range(2)
    )
    if is_packed:
        pack_layer(gate)
        pack_layer(up)
    norm = RMSNorm({"embed": FEATURES}, epsilon=1e-5, dtype="float32")
    rows = np.asarray(norm(jnp.asarray(x)))
    plain_gate, plain_up = (np.asarray(y) for y in project(jnp.asarray(x), gate, up, norm=norm))
    plain_sum = np.asarray(gate(jnp.asarray(x), residual=jnp.asarray(rows)))

    gate.adapters = nnx.data(adapters_of(gate, ids))
    delta = delta_of(gate.adapters, rows, ids)
    both = project(jnp.asarray(x), gate, up, norm=norm)
    # Float32 sums of 27 numbers of about 1, in another order.
    np.testing.assert_allclose(both[0], plain_gate + delta, atol=1e-4)
    np.testing.assert_allclose(both[1], plain_up, atol=1e-4)
    gated = project_gated(jnp.asarray(x), gate, up, activation="silu", norm=norm)
    wanted = np.asarray(jax.nn.silu(jnp.asarray(plain_gate + delta))) * plain_up
    np.testing.assert_allclose(gated, wanted, atol=1e-3)
    summed = gate(jnp.asarray(x), residual=jnp.asarray(rows))
    np.testing.assert_allclose(summed, plain_sum + delta_of(gate.adapters, x, ids), atol=1e-4)


def test_rows_of_other_adapters_and_of_padding_may_be_anything():
    pair = LoRAPair(jnp.full((2, 4), jnp.inf), jnp.ones((2, 4)))
    adapters = LayerAdapters(pair, own_rows(LoRAStack({"": pair}, 1), jnp.zeros(3, jnp.int32)))
    x = jnp.full((3, 4), jnp.nan)
    assert (adapters.add(x, jnp.ones((3, 4))) == 1).all()


def test_a_slot_is_written_without_the_others(data_dir):
    tiny = data_dir / "golden" / "tiny"
    config = ModelConfig.from_hf(json.loads((tiny / "llama" / "config.json").read_text()))
    adaptable = AdaptableModel.of(config, ["q_proj", "v_proj"])
    settings = {"max_loras": 3, "max_rank": 8, "dtype": "float32"}
    arrays = LoRAArrays(adaptable.layers, **settings)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(arrays.stack)]
    assert sum(sizes) == lora_bytes(adaptable.layers, **settings)
    assert len(sizes) == 2 * 2 * 2  # a and b of two layers of each of two
    adapter = read_adapter(str(tiny / "llama_lora_rs"), adaptable, max_rank=8, dtype="float32")
    arrays.load(2, adapter.layers)
    with CompilationCounter() as compilations:
        arrays.load(3, adapter.layers)
        arrays.load(3, {})
    assert compilations.count == 0
    for path, pair in arrays.stack.layers.items():
        for name in ("a", "b"):
            rows = np.asarray(getattr(pair, name))
            matrix = getattr(adapter.layers[path], name)
            np.testing.assert_array_equal(rows[8 : 8 + len(matrix)], matrix)
            assert not rows[:8].any()
            assert not rows[8 + len(matrix) :].any()
