"""Writes small GGUF files the way llama.cpp's converter does."""

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Kind = gguf.GGMLQuantizationType


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, Kind]],
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file; tensors are given as values and the type to store them in."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}


def convert_to_gguf(
    directory: Path,
    tokenizer_directory: Path,
    path: Path,
    *,
    experts_kind: Kind = Kind.BF16,
    split_experts: bool = False,
    **changes: Any,
) -> Path:
    """Convert a checkpoint of any family.

    `changes` are metadata keys with "__" for "."; None removes one. With `split_experts` each
    expert has a tensor, as in the first files of Mixtral.
    """
    config = json.loads((directory / "config_classic.json").read_text())
    # The converter makes no difference between Llama and Mistral.
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    metadata = model_metadata(config, architecture) | byte_vocab_metadata(tokenizer_directory)
    for key, value in changes.items():
        metadata[key.replace("__", ".")] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    heads = {}
    if architecture in ("llama", "granite"):
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = {}
    originals = load_file(directory / "model.safetensors")
    if architecture == "gpt-oss":
        originals = gpt_oss_tensors(originals)
    elif config.get("num_experts_per_tok") and not split_experts:
        originals = merge_experts(originals)
    for name, values in originals.items():
        values = np.asarray(values, np.float32)
        for projection, num_heads in heads.items():
            if f"{projection}_proj" in name:
                values = permute(values, num_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1  # so in `Gemma2Model.modify_tensors`
        kind = Kind.F32 if values.ndim == 1 else Kind.BF16
        if values.ndim == 3:
            kind = experts_kind
        tensors[gguf_name(name, architecture)] = (values, kind)
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = (llama3_factors(config), Kind.F32)
    if scaling.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(scaling[f"{length}_factor"], np.float32)
            tensors[f"rope_factors_{length}.weight"] = (factors, Kind.F32)
    return write_gguf(path, metadata, tensors, architecture)


def merge_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the tensors of a layer's experts, as `modify_tensors` of the converter does."""
    merged: dict[str, np.ndarray] = {}
    members: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        before, found, after = name.partition(".experts.")
        if not found:
            merged[name] = values
            continue
        number, _, rest = after.partition(".")
        # Mixtral's under the name that the converter gives them before it looks them up.
        stem = before.removeprefix("model.").removesuffix(".block_sparse_moe") + ".feed_forward"
        stem = stem if before.endswith("block_sparse_moe") else before
        members.setdefault(f"{stem}.experts.{rest}", {})[int(number)] = values
    for name, experts in members.items():
        merged[name] = np.stack([experts[number] for number in sorted(experts)])
    return merged


# OCP's E2M1.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def gpt_oss_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of gpt-oss' experts in full, outputs before inputs, gates and values apart."""
    made: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            made[name if name.endswith(("weight", "bias")) else f"{name}.weight"] = values
            continue
        if name.endswith("_scales"):
            continue
        stem, suffix = name, ".weight"
        if name.endswith("_bias"):
            stem, suffix, values = name.removesuffix("_bias"), ".bias", np.asarray(values)
        elif name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], 32)
            scales = np.exp2(tensors[f"{stem}_scales"].astype(np.float32) - 127)
            values = (_E2M1[codes] * scales[..., None]).reshape(*values.shape[:2], -1)
        else:
            values = np.swapaxes(values, 1, 2)
        if "gate_up_proj" in stem:
            made[stem.replace("gate_up_proj", "gate_proj") + suffix] = values[:, ::2]
            made[stem.replace("gate_up_proj", "up_proj") + suffix] = values[:, 1::2]
        else:
            made[stem + suffix] = values
    return made


def model_metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
    }
    for key, hf_key in _EXTRA_KEYS.get(architecture, {}).items():
        if config.get(hf_key) is not None:
            values[key] = config[hf_key]
    if architecture.startswith("gemma"):
        # The converter leaves it out: only the largest models have a scale of their own.
        values["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") == "linear":
        values["rope.scaling.type"] = "linear"
        values["rope.scaling.factor"] = scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        values["rope.scaling.type"] = "yarn"
        values["rope.scaling.factor"] = scaling["factor"]
        context = scaling["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = context
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if num_experts:
        values["expert_count"] = num_experts
        values["expert_used_count"] = config["num_experts_per_tok"]
        if architecture != "llama":
            width = config.get("moe_intermediate_size", config["intermediate_size"])
            values["expert_feed_forward_length"] = width
    return {f"{architecture}.{key}": value for key, value in values.items()}


_EXTRA_KEYS = {
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    "gpt-oss": {"attention.sliding_window": "sliding_window"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "phi3": {
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
}


def byte_vocab_metadata(directory: Path) -> dict[str, Any]:
    """Vocabulary of the tiny byte tokenizer; it has no merges, so no pre-tokenizer matters."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": json.loads((directory / "tokenizer_config.json").read_text())[
            "chat_template"
        ],
    }


def gguf_name(name: str, architecture: str = "llama") -> str:
    """GGUF name of a Hugging Face tensor, by gguf's own table."""
    if split := re.fullmatch(
        r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w\d).*", name
    ):
        base = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}[split[3]]
        return f"blk.{split[1]}.{base}.{split[2]}.weight"
    mapped = _name_map(architecture).get_name(name, try_suffixes=(".weight", ".bias"))
    assert mapped is not None, name
    return mapped


@functools.cache
def _name_map(architecture: str) -> gguf.TensorNameMap:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture], 2)


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's reordering of q and k rows (`LlamaModel.permute` in convert_hf_to_gguf.py)."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def llama3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """Frequency factors as the converter computes them, wave by wave."""
    scaling, head_dim = config["rope_scaling"], config["head_dim"]
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * config["rope_theta"] ** (i / head_dim)
        if wave < context / high:
            factors.append(1.0)
        elif wave > context / low:
            factors.append(scaling["factor"])
        else:
            smooth = (context / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
