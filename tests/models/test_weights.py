"""Safetensors files, the check that a checkpoint fits, and loading tensor by tensor."""

import dataclasses
import json
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.models.compilation import CompilationCounter
from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model, param_shardings
from paged.models.weights import SafetensorsSource, load_params, resolve_dtype
from paged.sharding import ShardingRules, tensor_parallel_mesh

TIED = ModelConfig(
    "LlamaForCausalLM", 16, 8, 12, 2, 4, 2, 2, 64, 1e-5, tie_word_embeddings=True, dtype="float32"
)
UNTIED_BIASED = replace(
    TIED,
    num_layers=11,  # "10" sorts before "2", so an order by name would show
    layer_windows=(),
    tie_word_embeddings=False,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)


@dataclass(frozen=True)
class DictSource:
    """Tensors made when they are read, as a dequantising source does."""

    shapes: dict[str, tuple[int, ...]]
    dtype: str = "float32"

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> np.ndarray:
        seed = list(self.shapes).index(name)
        values = np.empty(self.shapes[name], self.dtype)
        flat = values.reshape(-1)
        flat[:] = seed
        flat[:3] = [1, 2, 257]  # 257 shows whether bfloat16 rounding took place
        return values

    def close(self) -> None:
        pass


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint of `config`, as transformers saves it."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.attention_output_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        for name, (out, into, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (out, into)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (out,)
    return shapes


def load(config: ModelConfig, source: DictSource, dtype: str = "float32") -> nnx.State:
    return load_params(config, source, dtype=dtype, progress=False)


# Safetensors files


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_are_read_as_the_library_wrote_them(tmp_path: Path, dtype: type) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype)
    tensors = {"a": values, "b": np.full((1,), 7, dtype), "empty": np.zeros((0, 4), dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == ["a", "b", "empty"]
    for name, expected in tensors.items():
        assert source.shape(name) == expected.shape
        actual = source.read(name)
        assert actual.dtype == expected.dtype
        assert not actual.flags.writeable
        np.testing.assert_array_equal(actual, expected)
    source.close()
    assert source.names() == []


def test_sharded_checkpoint_is_one_source(tmp_path: Path) -> None:
    weight_map = {}
    for number in range(2):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({f"t{number}": np.full((2,), number, np.float32)}, tmp_path / file)
        weight_map[f"t{number}"] = file
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    source = SafetensorsSource(tmp_path)
    assert {name: source.read(name)[0] for name in source.names()} == {"t0": 0, "t1": 1}

    (tmp_path / weight_map["t1"]).unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002.safetensors, which"):
        SafetensorsSource(tmp_path)


def test_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"t": np.zeros(1, np.float32)}, tmp_path / "outside.safetensors")
    index = {"weight_map": {"t": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks \.\./outside\.safetensors"):
        SafetensorsSource(folder)


def test_index_without_weight_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: holds no weight_map; fetch"):
        SafetensorsSource(tmp_path)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        SafetensorsSource(tmp_path)


def file_of(header: object, num_bytes: int = 8) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file, or cut short within its header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (file_of({"t": tensor([2], 0, 8)})[:30], "cut short within its header"),
        (file_of({"t": tensor([2], 0, 8)})[:-1], "promises 8 bytes of tensors, the file holds 7"),
        (file_of({"t": tensor([1], 0, 4)}), "promises 4 bytes of tensors, the file holds 8"),
        (file_of({"t": tensor([3], 0, 8)}), r"damaged header .*8 bytes for F32 \[3\]"),
        (file_of({"t": tensor([2], 8, 0)}), "damaged header .*offsets 8:0"),
        (file_of({"t": tensor([-2], 0, 8)}), r"damaged header .*shape \[-2\]"),
        (file_of({"t": {"dtype": "F32"}}), "damaged header .*data_offsets"),
        (file_of({"t": []}), "damaged header"),
        (file_of([]), "damaged header"),
        ((3).to_bytes(8, "little") + b"{no", "damaged header"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path}: .*{message}.*") as error:
        SafetensorsSource(tmp_path)
    assert "fetch the checkpoint again" in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_element_type_is_named(tmp_path: Path) -> None:
    content = file_of({"t": tensor([8], 0, 8, "F8_E5M2")})
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor t .* has element type F8_E5M2; only F32,"):
        SafetensorsSource(tmp_path).read("t")


def test_weights_in_fewer_bits_need_a_config_that_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"tensor model.* has element type int32; only bfloa"):
        load(TIED, DictSource(hf_shapes(TIED), "int32"))


# Loading


def test_every_tensor_reaches_its_parameter() -> None:
    source = DictSource(hf_shapes(UNTIED_BIASED))
    params = load(UNTIED_BIASED, source)
    for layer in (1, 2, 10):
        attention = params["layers"][layer]["attention"]
        expected = source.read(f"model.layers.{layer}.self_attn.q_proj.weight")
        np.testing.assert_array_equal(attention["q_proj"]["weight"][...], expected.reshape(4, 2, 8))
        expected = source.read(f"model.layers.{layer}.self_attn.o_proj.weight")
        np.testing.assert_array_equal(attention["o_proj"]["weight"][...], expected.reshape(8, 4, 2))
    # Each tensor holds a number of its own, so none went to two parameters.
    last_values = [float(leaf.reshape(-1)[-1]) for leaf in jax.tree.leaves(params)]
    assert sorted(last_values) == list(range(len(source.shapes)))


def test_loaded_parameters_have_the_structure_of_the_abstract_model() -> None:
    _, abstract = abstract_model(TIED, dtype="bfloat16")
    params = load(TIED, DictSource(hf_shapes(TIED)), "bfloat16")
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_cast_on_the_way(stored: str, dtype: str) -> None:
    params = load(TIED, DictSource(hf_shapes(TIED), stored), dtype)
    values = np.asarray(params["norm"]["weight"][...])
    assert values.dtype == dtype
    rounds = "bfloat16" in (stored, dtype)
    np.testing.assert_array_equal(values[:3].astype(np.float32), [1, 2, 256 if rounds else 257])


def test_one_error_lists_everything_that_does_not_fit() -> None:
    shapes = hf_shapes(TIED)
    del shapes["model.norm.weight"]
    del shapes["model.layers.1.mlp.up_proj.weight"]
    shapes["model.layers.0.self_attn.q_proj.weight"] = (4, 16)
    shapes["model.layers.0.self_attn.q_proj.bias"] = (8,)
    shapes["visual.weight"] = (1,)
    with pytest.raises(CheckpointError) as error:
        load(TIED, DictSource(shapes))
    assert str(error.value) == (
        "the checkpoint's tensors do not fit its config (LlamaForCausalLM); "
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "unexpected: model.layers.0.self_attn.q_proj.bias, visual.weight; "
        "of another shape: model.layers.0.self_attn.q_proj.weight [4, 16] instead of [8, 8]. "
        "Fetch the checkpoint again, or correct the config."
    )


PHI3 = dataclasses.replace(TIED, architecture="Phi3ForCausalLM")


def phi3_shapes() -> dict[str, tuple[int, ...]]:
    apart = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    shapes = {name: shape for name, shape in hf_shapes(PHI3).items() if not apart_in(name, apart)}
    for layer in range(PHI3.num_layers):
        shapes[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = (8 + 4 + 4, 8)
        shapes[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = (2 * 12, 8)
    return shapes


def apart_in(name: str, apart: tuple[str, ...]) -> bool:
    return any(f".{part}." in name for part in apart)


def test_parameters_that_share_a_tensor_are_its_rows_in_the_order_of_the_rules() -> None:
    class Numbered(DictSource):
        def read(self, name: str) -> np.ndarray:
            return np.arange(np.prod(self.shapes[name]), dtype=np.float32).reshape(
                self.shapes[name]
            )

    params = load(PHI3, Numbered(phi3_shapes()))
    layer = params["layers"][1]
    rows = np.arange(16 * 8).reshape(16, 8)
    for name, part in (("q", rows[:8]), ("k", rows[8:12]), ("v", rows[12:])):
        weight = layer["attention"][f"{name}_proj"]["weight"][...]
        np.testing.assert_array_equal(np.asarray(weight).reshape(part.shape), part)
    rows = np.arange(24 * 8).reshape(24, 8)
    np.testing.assert_array_equal(layer["mlp"]["gate_proj"]["weight"][...], rows[:12])
    np.testing.assert_array_equal(layer["mlp"]["up_proj"]["weight"][...], rows[12:])


def test_a_shared_tensor_is_named_when_it_does_not_fit() -> None:
    shapes = phi3_shapes()
    shapes["model.layers.0.self_attn.qkv_proj.weight"] = (12, 8)
    del shapes["model.layers.1.mlp.gate_up_proj.weight"]
    match = r"missing: model\.layers\.1\.mlp\.gate_up_proj\.weight; of another shape: "
    match += r"model\.layers\.0\.self_attn\.qkv_proj\.weight \[12, 8\] instead of \[16, 8\]\."
    with pytest.raises(CheckpointError, match=match):
        load(PHI3, DictSource(shapes))


def test_missing_tensors_are_found_before_anything_is_read() -> None:
    class UnreadableSource(DictSource):
        def read(self, name: str) -> np.ndarray:
            raise AssertionError(f"{name} was read")

    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight"):
        load(TIED, UnreadableSource({}))


def test_layers_that_predict_further_tokens_are_skipped_by_their_number(data_dir: Path) -> None:
    folder = data_dir / "golden" / "tiny" / "deepseek_v3"
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert (config.num_layers, config.num_further_layers) == (2, 1)
    source = SafetensorsSource(folder)
    shapes = {name: source.shape(name) for name in source.names()}
    shapes |= {  # as DeepSeek-V3 has them in its layer 61
        name.replace("layers.1.", "layers.2."): shape
        for name, shape in shapes.items()
        if "layers.1." in name
    }
    shapes |= {"model.layers.2.eh_proj.weight": (64, 128), "model.layers.2.enorm.weight": (64,)}
    load(config, DictSource(shapes))
    shapes |= {"model.layers.3.enorm.weight": (64,)}
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.3\.enorm\.weight\. F"):
        load(config, DictSource(shapes))


def test_redundant_tensors_are_ignored() -> None:
    shapes = hf_shapes(TIED)
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (1,)
    shapes["lm_head.weight"] = (16, 8)  # a copy of the embedding, which is tied
    load(TIED, DictSource(shapes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_needs_the_memory_of_one_tensor(dtype: str) -> None:
    vocab_size, hidden = 2**15, 256
    config = ModelConfig(
        "LlamaForCausalLM", vocab_size, hidden, 512, 3, 4, 2, 64, 64, 1e-5, dtype=dtype
    )
    source = DictSource(hf_shapes(config), dtype)
    largest = vocab_size * hidden * np.dtype(dtype).itemsize
    load(config, source, dtype)  # tracing leaves its own caches behind
    tracemalloc.start()
    try:
        params = load(config, source, dtype)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(jax.tree.leaves(params)) == len(source.shapes)
    # `kept` are NumPy buffers that JAX took over as weights.
    assert peak - kept < 1.3 * largest


def test_a_jitted_step_over_loaded_weights_and_a_new_cache_is_compiled_once() -> None:
    params = load(TIED, DictSource(hf_shapes(TIED)))
    cache = allocate_kv_cache(KVCacheSpec(2, 2, 2, 4, "float32"), 3)

    def step(params: nnx.State, cache: KVCache) -> tuple[KVCache, list[jax.Array]]:
        return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), cache), jax.tree.leaves(params)

    jitted = jax.jit(step, donate_argnums=1)
    with CompilationCounter() as compilations:
        for _ in range(3):
            cache, _ = jitted(params, cache)
    assert compilations.count == 1


def test_weights_do_not_depend_on_the_file_after_loading(tmp_path: Path) -> None:
    shapes = hf_shapes(TIED)
    path = tmp_path / "model.safetensors"
    # 64-byte alignment is what makes JAX keep a buffer; the first tensor has it if the header does.
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, path)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    padded = path.read_bytes()[8 : 8 + header_bytes] + b" " * (-(header_bytes + 8) % 64)
    path.write_bytes(
        len(padded).to_bytes(8, "little") + padded + path.read_bytes()[8 + header_bytes :]
    )
    source = SafetensorsSource(tmp_path)
    params = load_params(TIED, source, dtype="float32", progress=False)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_device_gets_its_slice(dtype: str) -> None:
    source = DictSource(hf_shapes(UNTIED_BIASED))
    _, abstract = abstract_model(UNTIED_BIASED, dtype=dtype)
    shardings = param_shardings(abstract, ShardingRules(), tensor_parallel_mesh(2))
    params = load_params(UNTIED_BIASED, source, dtype=dtype, shardings=shardings, progress=False)
    whole = load(UNTIED_BIASED, source, dtype)
    triples = zip(*map(jax.tree.leaves, (params, whole, shardings)), strict=True)
    for leaf, expected, sharding in triples:
        assert leaf.sharding == sharding
        np.testing.assert_array_equal(leaf, expected)
    up_proj = params["layers"][0]["mlp"]["up_proj"]["weight"][...]
    assert [shard.data.shape for shard in up_proj.addressable_shards] == [(6, 8), (6, 8)]


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_on_standard_error(
    capsys: pytest.CaptureFixture[str], progress: bool
) -> None:
    load_params(TIED, DictSource(hf_shapes(TIED)), dtype="float32", progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("Loading weights: 100%" in captured.err) == progress


# Element type


@pytest.mark.parametrize(
    ("requested", "stored", "expected"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16"),
        ("auto", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float16", "float32", "float16"),
    ],
)
def test_dtype_is_resolved(requested: str, stored: str, expected: str) -> None:
    assert resolve_dtype(requested, replace(TIED, dtype=stored)) == expected


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='int8' is unknown; choose auto, bfloat16, float16"):
        resolve_dtype("int8", TIED)
