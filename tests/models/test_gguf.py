"""GGUF files: the header, the tensors in Hugging Face layout, the configuration."""

import dataclasses
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from paged.models import gguf_source
from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.gguf_config import gguf_hf_config, gguf_model_config
from paged.models.gguf_families import GGUF_FAMILIES
from paged.models.gguf_file import FastGGUFReader, GGUFFile
from paged.models.gguf_source import GGUFSource, hf_tensor_name
from tests.models.gguf_writing import Kind, convert_to_gguf, permute, write_gguf

TINY = "golden/tiny"


@pytest.fixture
def tiny_gguf(data_dir: Path, tmp_path: Path):
    """Converts a tiny checkpoint to GGUF, with changed metadata."""
    numbers = itertools.count()

    def convert(name: str = "llama3_rope", **changes: Any) -> GGUFFile:
        path = tmp_path / f"{name}-{next(numbers)}.gguf"
        tiny = data_dir / TINY
        return GGUFFile(convert_to_gguf(tiny / name, tiny / "tokenizer", path, **changes))

    return convert


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred bytes with every kind of thing in them."""
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "small.gguf",
        {"a.text": "日本", "a.list": ["x", "yz"], "a.ints": [1, 2, 3]}
        | {"a.float": 1e-5, "a.floats": [0.1, -2.5e-6]},
        {
            "matrix": (np.arange(64).reshape(2, 32), Kind.Q8_0),
            "vector": (np.arange(3), Kind.F32),
        },
    )


# --- the file ----------------------------------------------------------------------------------


def test_the_fast_reader_reads_what_the_plain_one_reads(tmp_path: Path):
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    types = gguf.GGUFValueType
    scalars = {
        types.UINT8: 255,
        types.INT8: -128,
        types.UINT16: 65535,
        types.INT16: -2,
        types.UINT32: 2**32 - 1,
        types.INT32: -(2**31),
        types.UINT64: 2**64 - 1,
        types.INT64: -(2**63),
        types.FLOAT64: 0.1,
        types.BOOL: True,
        types.STRING: "naïve 🙂",
    }
    for kind, value in scalars.items():
        writer.add_key_value(f"scalar.{kind.name}", value, kind)
        writer.add_key_value(f"array.{kind.name}", [value, value], types.ARRAY, kind)
    writer.add_key_value("array.nested", [[1, 2], [3]], types.ARRAY, types.ARRAY)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.ones((2, 34), np.uint8), raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fast, reference = FastGGUFReader(path), gguf.GGUFReader(path)
    assert list(fast.fields) == list(reference.fields)
    for name, field in reference.fields.items():
        assert fast.fields[name].contents() == field.contents(), name
        assert fast.fields[name].types == field.types, name
    for tensor, expected in zip(fast.tensors, reference.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type) == (expected.name, expected.tensor_type)
        assert tensor.data_offset == expected.data_offset
        np.testing.assert_array_equal(tensor.data, expected.data, strict=True)
    metadata = GGUFFile(path).metadata
    assert list(metadata) == [name for name in reference.fields if not name.startswith("GGUF.")]
    assert metadata["scalar.INT64"] == -(2**63)
    assert metadata["array.STRING"] == ["naïve 🙂"] * 2


def test_floats_are_the_decimals_that_were_meant(small_file: Path):
    metadata = GGUFFile(small_file).metadata
    assert metadata["a.float"] == 1e-5
    assert metadata["a.floats"] == [0.1, -2.5e-6]


def test_tensor_table_has_rows_of_bytes(small_file: Path):
    tensors = GGUFFile(small_file).tensors
    assert tensors["matrix"].shape == (2, 32)
    assert tensors["matrix"].data.shape == (2, 34)  # float16 scale and 32 bytes per block
    assert tensors["vector"].data.view(np.float32).tolist() == [[0, 1, 2]]


def test_alignment_of_the_file_is_followed(tmp_path: Path):
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GGUFFile(path).tensors["vector"].data.view(np.float32)
    assert values.tolist() == [[0, 1, 2, 3, 4]]


def test_a_file_cut_anywhere_is_refused_in_one_line(small_file: Path, tmp_path: Path):
    content = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The writer pads the end to a multiple of 32; the last tensor has 12 bytes.
    for size in range(len(content) - 20):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="fetch the file again") as raised:
            GGUFFile(cut)
        assert str(cut) in str(raised.value)
        assert "\n" not in str(raised.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damaged_bytes_give_no_other_error(small_file: Path, tmp_path: Path, data: st.DataObject):
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        file = GGUFFile(damaged)
    except CheckpointError:
        return
    assert all(tensor.data.nbytes <= len(content) for tensor in file.tensors.values())


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_row(*shape: int, kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot mmap an empty file"),
        (b"PK\x03\x04 a zip file", "cannot be read as GGUF .*magic invalid"),
        (header(version=1), "file appears to be version 1 which we cannot handle"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian, only little-endian files are"),
        (header(num_keys=1) + key(b"k", 77, b""), r"77\) is not a valid GGUFValueType"),
        (
            header(num_keys=1) + key(b"k", 9, struct.pack("<IQ", 77, 1)),
            r"77\) is not a valid GGUFValueType",
        ),
        (header(num_keys=1) + key(b"\xff", 0, b"1"), "can't decode byte 0xff"),
        (header(num_keys=1) + key(b"k", 8, text(b"\xff")), "can't decode byte 0xff"),
        (header(num_keys=2) + 2 * key(b"k", 0, b"1"), "Duplicate k already in list"),
        (header(num_keys=2**60), "it goes on to byte 32 but ends at 24"),
        (header(num_keys=1) + key(b"k", 9, struct.pack("<IQ", 8, 2**60)), "it goes on to byte"),
        (header(num_keys=1) + key(b"k", 9, struct.pack("<IQ", 4, 2**60)), "it goes on to byte"),
        (
            header(num_keys=1) + key(b"k", 9, 5000 * struct.pack("<IQ", 9, 1)),
            "maximum recursion depth",
        ),
        (
            header(1) + tensor_row(4, kind=999) + bytes(64),
            r"999\) is not a valid GGMLQuantizationType",
        ),
        (header(1) + tensor_row() + bytes(64), r"tensor 't' has shape \(\), which holds no values"),
        (
            header(1) + tensor_row(3, 0) + bytes(64),
            r"tensor 't' has shape \(0, 3\), which holds no values",
        ),
        (header(1) + tensor_row(*[1] * 65) + bytes(64), "maximum supported dimension"),
        (header(1) + tensor_row(2**32, 2**32) + bytes(64), "cannot reshape"),
        (header(1) + tensor_row(33, kind=8), r"row size \(33\) is not a multiple of Q8_0 block"),
        (header(1) + tensor_row(4) + bytes(16), "it goes on to byte 80 but ends at"),
        (header(1) + tensor_row(1, offset=2**64 - 32) + bytes(64), "overflow encountered"),
        (header(2) + 2 * tensor_row(1) + bytes(64), "duplicated tensor with name t"),
        (header(2) + 2 * tensor_row(1, name=b"a\nb") + bytes(64), r"with name a b\)"),
        (
            header(num_keys=1) + key(b"general.alignment", 4, struct.pack("<I", 0)),
            "Invalid alignment",
        ),
        (header(num_keys=1) + key(b"split.count", 2, struct.pack("<H", 3)), "is one of 3 parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        GGUFFile(path)
    assert "\n" not in str(raised.value)


def test_parts_that_were_joined_are_no_parts(tmp_path: Path):
    path = tmp_path / "joined.gguf"
    path.write_bytes(header(num_keys=1) + key(b"split.count", 2, struct.pack("<H", 0)))
    assert GGUFFile(path).metadata == {"split.count": 0}


def test_a_path_without_a_file_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        GGUFFile(tmp_path)


# --- the tensors -------------------------------------------------------------------------------


GGUF_TINY = [
    "gemma2",
    "gemma3_text",
    "granite",
    "llama3_rope",
    "olmo2",
    "phi3",
    "phi3_longrope",
    "phi3_partial_rope",
    "qwen2_yarn",
    "qwen3",
]


@pytest.mark.parametrize("name", GGUF_TINY)
def test_tensors_equal_those_of_the_checkpoint(tiny_gguf, data_dir: Path, name: str):
    source = GGUFSource(tiny_gguf(name))
    expected = load_file(data_dir / TINY / name / "model.safetensors")
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        assert source.shape(name) == values.shape
        read = source.read(name)
        assert np.array_equal(read.astype(np.float32), values.astype(np.float32)), name
        assert read.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("shape", [(64, 32), (32,)])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_unquantized_values_are_rounded_to_bfloat16(
    tmp_path: Path, kind: Kind, shape: tuple[int, ...]
):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    read = source_of(tmp_path / "plain", values, kind).read("mine")
    stored = values.astype(np.float16) if kind is Kind.F16 else values
    assert read.dtype == ml_dtypes.bfloat16
    assert np.array_equal(read, stored.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_blocks_are_dequantized_alike_in_slices_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
):
    values = np.random.default_rng(1).normal(size=(93, 64)).astype(np.float32)
    expected = gguf.dequantize(gguf.quantize(values, kind), kind).astype(ml_dtypes.bfloat16)
    source = source_of(tmp_path / "q", values, kind)
    for slice_values in (64, 64 * 7, 64 * 40, 1 << 20):
        monkeypatch.setattr(gguf_source, "_SLICE_VALUES", slice_values)
        assert np.array_equal(source.read("mine"), expected)


def test_k_quants_are_dequantized(tmp_path: Path):
    raw = np.random.default_rng(2).integers(0, 256, (6, 144), np.uint8)
    raw[:, :4] = np.float16([0.5, 0.25]).view(np.uint8)  # block scales
    source = source_of(tmp_path / "q4k", raw, Kind.Q4_K, raw=True)
    expected = gguf.dequantize(raw, Kind.Q4_K).astype(ml_dtypes.bfloat16)
    assert source.shape("mine") == (6, 256)
    assert np.array_equal(source.read("mine"), expected)


def test_a_type_without_dequantization_is_refused(tmp_path: Path):
    raw = np.zeros((2, 292), np.uint8)
    source = source_of(tmp_path / "q8k", raw, Kind.Q8_K, raw=True)
    with pytest.raises(CheckpointError, match="tensor 'mine' has type Q8_K, which cannot be"):
        source.read("mine")


def source_of(path: Path, values: np.ndarray, kind: Kind, *, raw: bool = False) -> GGUFSource:
    """A source with one more tensor, "mine", of values or of raw blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    data = values if raw else gguf.quantize(values, kind)
    writer.add_tensor("mine", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path)


def test_a_closed_source_has_no_tensors(tiny_gguf):
    source = GGUFSource(tiny_gguf())
    source.close()
    assert source.names() == []


@given(st.integers(1, 6), st.integers(1, 5))
def test_row_order_of_llama_cpp_is_undone(num_heads: int, half: int):
    rows = np.arange(num_heads * half * 2 * 3).reshape(-1, 3)
    restored = gguf_source._halves_from_pairs(permute(rows, num_heads), num_heads)
    assert np.array_equal(restored, rows)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.11.attn_k.bias", "model.layers.11.self_attn.k_proj.bias"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
        ("v.patch_embd.weight", "v.patch_embd.weight"),
    ],
)
def test_tensor_names(name: str, expected: str):
    assert hf_tensor_name(name, GGUF_FAMILIES["llama"]) == expected


def test_demo_model_gives_the_golden_logits(demo_model_path: Path, data_dir: Path):
    """In plain numpy: shows that names, layout and rounding are right, whatever the engine does."""
    golden = json.loads((data_dir / "golden/smollm2-135m-instruct.json").read_text())
    source = GGUFSource(demo_model_path)
    config = gguf_model_config(GGUFFile(demo_model_path))
    prompt = next(row for row in golden["prompts"] if row["name"] == "short")
    hidden, logits = llama_in_numpy(source, config, prompt["ids_no_special"])
    expected = prompt["last_position"]
    # Tolerances of the golden data.
    np.testing.assert_allclose(logits[:16], expected["logits_0_16"], atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(hidden[:16], expected["hidden_0_16"], atol=1e-3, rtol=1e-4)
    assert int(logits.argmax()) == expected["logits_argmax"]


def llama_in_numpy(
    source: GGUFSource, config: ModelConfig, ids: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Final hidden state and logits at the last token."""

    def weight(name: str) -> np.ndarray:
        return source.read(name).astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x / scale * weight(name)

    def heads(x: np.ndarray, name: str, count: int) -> np.ndarray:
        return (x @ weight(name).T).reshape(len(ids), count, config.head_dim).swapaxes(0, 1)

    half = np.arange(config.head_dim // 2) * 2 / config.head_dim
    angles = np.arange(len(ids))[:, None] * config.rope.theta**-half
    cos, sin = np.cos(angles), np.sin(angles)

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    embedding = weight("model.embed_tokens.weight")
    x = embedding[ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    group = config.num_q_heads // config.num_kv_heads
    for number in range(config.num_layers):
        layer = f"model.layers.{number}"
        h = norm(x, f"{layer}.input_layernorm.weight")
        q = rotate(heads(h, f"{layer}.self_attn.q_proj.weight", config.num_q_heads))
        k = rotate(heads(h, f"{layer}.self_attn.k_proj.weight", config.num_kv_heads))
        v = heads(h, f"{layer}.self_attn.v_proj.weight", config.num_kv_heads)
        scores = q @ k.repeat(group, 0).swapaxes(1, 2) / np.sqrt(config.head_dim) + future
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        mixed = (probabilities @ v.repeat(group, 0)).swapaxes(0, 1).reshape(len(ids), -1)
        x = x + mixed @ weight(f"{layer}.self_attn.o_proj.weight").T
        h = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = h @ weight(f"{layer}.mlp.gate_proj.weight").T
        up = h @ weight(f"{layer}.mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{layer}.mlp.down_proj.weight").T
    hidden = norm(x[-1:], "model.norm.weight")[0]
    return hidden, embedding @ hidden


# --- the configuration -------------------------------------------------------------------------


def test_demo_model_config(demo_model_path: Path):
    config = gguf_model_config(GGUFFile(demo_model_path))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.kind) == (1e-5, 1e5, "default")
    assert config.tie_word_embeddings
    assert not config.attention_bias
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["llama", *GGUF_TINY])
def test_config_equals_that_of_the_checkpoint(tiny_gguf, data_dir: Path, name: str):
    # Every sixth layer of a Gemma 3 attends fully; that the tiny one's second does, no file says.
    changes = {"layer_types": None, "sliding_window_pattern": 6} if name == "gemma3_text" else {}
    original = json.loads((data_dir / TINY / name / "config.json").read_text()) | changes
    original["dtype"] = "bfloat16"  # what a GGUF file is read as
    got, expected = gguf_model_config(tiny_gguf(name)), ModelConfig.from_hf(original)
    rounded = {}  # numbers that went through float32
    if expected.attention_scale is not None:
        assert got.attention_scale == pytest.approx(expected.attention_scale, rel=1e-6)
        rounded["attention_scale"] = None
    if name == "phi3_longrope":
        assert got.rope.long_factor == pytest.approx(expected.rope.long_factor, rel=1e-6)
        rounded["rope"] = dataclasses.replace(expected.rope, long_factor=())
        got = dataclasses.replace(got, rope=dataclasses.replace(got.rope, long_factor=()))
    assert dataclasses.replace(got, **{**rounded, "rope": got.rope}) == dataclasses.replace(
        expected, **rounded
    )


def test_rope_scaling_of_the_metadata(tiny_gguf):
    linear = tiny_gguf(
        "llama", llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0
    )
    rope = gguf_model_config(linear).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    yarn = tiny_gguf(
        "llama",
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=8.0,
        llama__rope__scaling__original_context_length=64,
        llama__rope__scaling__yarn_beta_fast=16.0,
    )
    rope = gguf_model_config(yarn).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 8.0, 64)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)


def test_end_of_turn_ids_end_a_text_too(tiny_gguf):
    file = tiny_gguf(tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=2)
    assert gguf_model_config(file).eos_token_ids == (2, 7)


def test_equal_values_of_all_layers_are_one(tiny_gguf):
    file = tiny_gguf(llama__attention__head_count_kv=[2, 2])
    assert gguf_model_config(file).num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__expert_shared_count": 8}, "llama.expert_shared_count=8 is not supported"),
        ({"llama__attention__value_length": 64}, "value_length=64 is not supported"),
        ({"llama__rope__scaling__yarn_attn_factor": 1.5}, "yarn_attn_factor=1.5 is not"),
        ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv differs from layer to"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused(tiny_gguf, changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        gguf_model_config(tiny_gguf("llama", **changes))


def test_unknown_frequency_factors_are_refused(tiny_gguf):
    file = tiny_gguf("llama3_rope", llama__rope__freq_base=1000.0)  # they no longer fit the base
    with pytest.raises(UnsupportedModelError, match=r"are not those of Llama 3\.1 and later"):
        gguf_model_config(file)


def test_unknown_architecture_names_the_supported_ones(tmp_path: Path):
    path = write_gguf(tmp_path / "mamba.gguf", {}, {}, architecture="mamba")
    with pytest.raises(
        UnsupportedModelError, match="'mamba' is not supported; supported: gemma2, gem"
    ):
        gguf_hf_config(GGUFFile(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": None}, "its metadata lacks llama.block_count"),
        ({"llama__attention__head_count": 0}, "head_count=0 must be a positive integer"),
        ({"llama__context_length": "long"}, "context_length='long' must be a positive integer"),
    ],
)
def test_damaged_metadata_is_refused(tiny_gguf, changes: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        gguf_model_config(tiny_gguf("llama", **changes))


def test_a_file_without_embeddings_is_refused(tmp_path: Path, tiny_gguf):
    metadata = tiny_gguf("llama").metadata
    del metadata["general.architecture"]  # the writer adds it
    path = write_gguf(tmp_path / "empty.gguf", metadata, {})
    with pytest.raises(CheckpointError, match=r"has no tensor 'token_embd.weight'"):
        gguf_hf_config(GGUFFile(path))
