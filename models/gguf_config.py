"""The configuration that GGUF metadata describes, in the terms of a Hugging Face `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from paged.models.config import ModelConfig
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.gguf_families import GGUF_FAMILIES, GGUF_MIXTURES, GGUFFamily
from paged.models.gguf_file import GGUFFile
from paged.models.gguf_keys import Keys

_LLAMA3_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (_LLAMA3_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
"""Tensors of factors on the rotary frequencies: configuration, not weights."""

# Constants of every published checkpoint with "llama3" scaling, and candidates for the length of
# the original context (8192 in Llama 3): GGUF stores only the factors that follow from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXTS = [2**exponent for exponent in range(6, 21)]

# Keys that change the arithmetic in ways the engine does not know, and their neutral values.
_NEUTRAL = {
    "expert_count": 0,
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Return the `ModelConfig` of a GGUF file.

    Raises:
      UnsupportedModelError: if the architecture or one of its settings is not implemented.
      CheckpointError: if the metadata lacks a key.
    """
    return ModelConfig.from_hf(gguf_hf_config(file))


def gguf_hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return what `config.json` of the original checkpoint says, as far as the engine reads it.

    Raises:
      UnsupportedModelError: if the architecture or one of its settings is not implemented.
      CheckpointError: if the metadata lacks a key.
    """
    architecture = file.metadata.get("general.architecture")
    family = gguf_family(file)
    keys = Keys(file, str(architecture))
    for key, neutral in _NEUTRAL.items():
        if key not in family.extra_keys and (value := keys.get(key, neutral)) != neutral:
            raise UnsupportedModelError(
                f"{file.path}: {architecture}.{key}={value} is not supported (only {neutral})."
            )
    hidden_size, num_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.get("attention.key_length", hidden_size // num_heads)
    if (value := keys.get("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: {architecture}.attention.value_length={value} is not supported where "
            f"the head size is {head_dim}."
        )
    rotary_dim = keys.get("rope.dimension_count", head_dim)
    eos_token_ids = gguf_eos_token_ids(file.metadata)
    config = {
        "architectures": [family.architecture],
        "model_type": architecture,
        "vocab_size": _num_embeddings(file),
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, keys, rotary_dim),
        "partial_rotary_factor": rotary_dim / head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "hidden_act": "silu",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos_token_ids) or None,
        "torch_dtype": "bfloat16",
    }
    if keeps_mxfp4(file):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return config | family.read(keys, config)


def gguf_family(file: GGUFFile) -> GGUFFamily:
    """Return what a file's architecture is; raises `UnsupportedModelError` if it is unknown."""
    architecture = file.metadata.get("general.architecture")
    families = GGUF_FAMILIES
    if file.metadata.get(f"{architecture}.expert_count") and architecture in GGUF_MIXTURES:
        families = GGUF_MIXTURES
    if architecture not in families:
        supported = sorted({*GGUF_FAMILIES, *GGUF_MIXTURES})
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(supported)}."
        )
    return families[architecture]


def keeps_mxfp4(file: GGUFFile) -> bool:
    """Return whether the experts of a file are in MXFP4, and stay in it."""
    experts = [tensor for name, tensor in file.tensors.items() if name.endswith("_exps.weight")]
    return gguf_family(file).keeps_mxfp4 and all(
        tensor.kind is gguf.GGMLQuantizationType.MXFP4 for tensor in experts
    )


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text or a turn, the tokenizer's own first."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _num_embeddings(file: GGUFFile) -> int:
    # Not `vocab_size` of the metadata: older files lack it, and matrices may have padding rows.
    if (embedding := file.tensors.get("token_embd.weight")) is None:
        raise CheckpointError(
            f"{file.path}: it has no tensor 'token_embd.weight'; pass a file that holds a whole "
            "model."
        )
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, keys: Keys, rotary_dim: int) -> dict[str, Any] | None:
    if (values := _factors(file, _LLAMA3_FACTORS)) is not None:
        return _llama3_scaling(file, values, keys.get("rope.freq_base", 10000.0), rotary_dim)
    short, long = _factors(file, _SHORT_FACTORS), _factors(file, _LONG_FACTORS)
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
            "attention_factor": keys.get("rope.scaling.attn_factor"),
        }
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys["rope.scaling.factor"]}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": keys["rope.scaling.factor"],
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnsupportedModelError(
        f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, and "
        "the frequency factors of Llama 3.1 and later."
    )


def _factors(file: GGUFFile, name: str) -> np.ndarray | None:
    tensor = file.tensors.get(name)
    return None if tensor is None else tensor.data.view(np.float32).ravel()


def _llama3_scaling(
    file: GGUFFile, factors: np.ndarray, theta: float, head_dim: int
) -> dict[str, Any]:
    """Return the "llama3" scaling that stored frequency factors come from.

    llama.cpp divides each frequency by one of them. Parameters that give back every factor are
    right even if others would too.
    """
    for context in _LLAMA3_CONTEXTS:
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            **_LLAMA3,
            "original_max_position_embeddings": context,
        }
        expected = _llama3_factors(scaling, theta, head_dim)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return scaling
    raise UnsupportedModelError(
        f"{file.path}: the factors in {_LLAMA3_FACTORS!r} are not those of Llama 3.1 and later; "
        "pass the checkpoint as a Hugging Face directory."
    )


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Return what "llama3" scaling divides each of the `head_dim / 2` frequencies by."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    # 0: a wave longer than the original context is slowed by the whole factor; 1: a short one
    # is left alone.
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    factors: np.ndarray = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors
