"""`FAMILIES`: what the configuration of each architecture says beyond what all have in common.

One reader for each name that `architectures` may hold: it takes a `config.json` and the number of
layers, and returns fields of `ModelConfig`. Defaults are those of transformers' configuration
classes, since published checkpoints leave out what equals them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged.models.config_values import (
    natural_int,
    optional_float,
    positive_float,
    positive_int,
)
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.latent_config import latent_scale, read_latent
from paged.models.moe_config import (
    read_deepseek_v2_experts,
    read_deepseek_v3_experts,
    read_experts,
    read_gpt_oss_experts,
    read_qwen3_experts,
)
from paged.models.rope_config import RopeConfig, read_rope

type Config = Mapping[str, Any]
type Windows = tuple[int | None, ...]

FULL, SLIDING = "full_attention", "sliding_attention"


def _llama(config: Config, num_layers: int) -> dict[str, Any]:
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise UnsupportedModelError(
            f"sliding_window={window} is not implemented for LlamaForCausalLM; "
            "only full attention is."
        )
    return {
        **_attention_biases(config),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "layer_windows": _full(config, num_layers),
    }


def _mistral(config: Config, num_layers: int) -> dict[str, Any]:
    # An absent key is the window of the first Mistral; later ones say null.
    if config.get("sliding_window", 4096) is None:
        return {"layer_windows": _full(config, num_layers)}
    window = positive_int(config, "sliding_window", default=4096)
    return {"layer_windows": windows_by_layer(config, window, [SLIDING] * num_layers)}


def _qwen2(config: Config, num_layers: int) -> dict[str, Any]:
    # Biases are not in the config: Qwen2 always has them, on q, k and v only.
    return {"attention_bias": True, "layer_windows": qwen_windows(config, num_layers)}


def _qwen3(config: Config, num_layers: int) -> dict[str, Any]:
    return {
        **_attention_biases(config),
        "qk_norm": "head",
        "layer_windows": qwen_windows(config, num_layers),
    }


def _gemma2(config: Config, num_layers: int) -> dict[str, Any]:
    window = positive_int(config, "sliding_window", default=4096)
    return {
        **_gemma(config),
        "attention_soft_cap": _soft_cap(config, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": _soft_cap(config, "final_logit_softcapping", 30.0),
        "layer_windows": windows_by_layer(config, window, _every(2, num_layers)),
    }


def _gemma3(config: Config, num_layers: int) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "use_bidirectional_attention is not implemented; only models that generate text are."
        )
    pattern = positive_int(config, "sliding_window_pattern", default=6)
    window = positive_int(config, "sliding_window", default=4096)
    return {
        **_gemma(config),
        "qk_norm": "head",
        "attention_soft_cap": optional_float(config, "attn_logit_softcapping"),
        "logit_soft_cap": optional_float(config, "final_logit_softcapping"),
        "layer_windows": windows_by_layer(config, window, _every(pattern, num_layers)),
        **_gemma3_ropes(config),
    }


def _phi3(config: Config, num_layers: int) -> dict[str, Any]:
    if config.get("sliding_window") is None:
        return {"layer_windows": _full(config, num_layers)}
    window = positive_int(config, "sliding_window")
    return {"layer_windows": windows_by_layer(config, window, [SLIDING] * num_layers)}


def _olmo2(config: Config, num_layers: int) -> dict[str, Any]:
    return {
        **_attention_biases(config),
        "norms": "after",
        "qk_norm": "all",
        "layer_windows": _full(config, num_layers),
    }


def _granite(config: Config, num_layers: int) -> dict[str, Any]:
    return {
        **_attention_biases(config),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "attention_scale": positive_float(config, "attention_multiplier", default=1.0),
        "embedding_multiplier": positive_float(config, "embedding_multiplier", default=1.0),
        "residual_multiplier": positive_float(config, "residual_multiplier", default=1.0),
        "logit_divisor": positive_float(config, "logits_scaling", default=1.0),
        "layer_windows": _full(config, num_layers),
    }


def _mixtral(config: Config, num_layers: int) -> dict[str, Any]:
    windows = _full(config, num_layers)
    if config.get("sliding_window") is not None:  # unlike Mistral's, absent is none
        window = positive_int(config, "sliding_window")
        windows = windows_by_layer(config, window, [SLIDING] * num_layers)
    return {"experts": read_experts(config), "layer_windows": windows}


def _qwen3_moe(config: Config, num_layers: int) -> dict[str, Any]:
    return {**_qwen3(config, num_layers), "experts": read_qwen3_experts(config, num_layers)}


def _deepseek_v2(config: Config, num_layers: int) -> dict[str, Any]:
    if config.get("mlp_bias"):
        raise UnsupportedModelError(
            "mlp_bias=True is not implemented for DeepseekV2ForCausalLM; only MLPs without are."
        )
    experts = read_deepseek_v2_experts(config, num_layers)
    return {**_latent(config, num_layers), "experts": experts}


def _deepseek_v3(config: Config, num_layers: int) -> dict[str, Any]:
    experts = read_deepseek_v3_experts(config, num_layers)
    return {**_latent(config, num_layers), "experts": experts}


def _latent(config: Config, num_layers: int) -> dict[str, Any]:
    """Return what models with latent attention have in common."""
    latent = read_latent(config)
    longest = positive_int(config, "max_position_embeddings")
    rope = read_rope(config, longest, latent.rope_dim)
    return {
        **_attention_biases(config),
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.head_dim,
        "rope": rope,
        "attention_scale": latent_scale(latent, rope),
        "layer_windows": _full(config, num_layers),
        "num_further_layers": natural_int(config, "num_nextn_predict_layers", 0),
    }


def _gpt_oss(config: Config, num_layers: int) -> dict[str, Any]:
    window = positive_int(config, "sliding_window", default=128)
    kinds = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    has_bias = bool(config.get("attention_bias", True))
    return {
        "attention_bias": has_bias,
        "attention_output_bias": has_bias,
        "attention_sinks": True,
        "experts": read_gpt_oss_experts(config),
        "layer_windows": windows_by_layer(config, window, kinds),
    }


FAMILIES: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Mistral3ForConditionalGeneration": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2VLForConditionalGeneration": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3VLForConditionalGeneration": _qwen3,
}

_SHARED = "it has shared experts beside those that are routed to"
NOT_IMPLEMENTED = {
    "DeepseekV32ForCausalLM": "it attends to a few tokens that an indexer chooses",
    "Qwen2MoeForCausalLM": _SHARED,
    "Qwen3NextForCausalLM": "it has linear attention and shared experts",
    "Glm4MoeForCausalLM": _SHARED,
}
"""Well-known architectures that there are not, and why."""


def _attention_biases(config: Config) -> dict[str, bool]:
    attention_bias = bool(config.get("attention_bias", False))
    return {"attention_bias": attention_bias, "attention_output_bias": attention_bias}


# --- Gemma -------------------------------------------------------------------------------------


def _gemma(config: Config) -> dict[str, Any]:
    """Return what Gemma 2 and 3 have in common."""
    return {
        **_attention_biases(config),
        "norms": "around",
        "norm_adds_one": True,
        "activation": read_activation(config, default="gelu_pytorch_tanh"),
        "attention_scale": positive_float(config, "query_pre_attn_scalar", default=256.0) ** -0.5,
        "embedding_multiplier": positive_int(config, "hidden_size") ** 0.5,
        "tie_word_embeddings": config.get("tie_word_embeddings") is not False,
    }


def _gemma3_ropes(config: Config) -> dict[str, RopeConfig]:
    """Return the embedding of full layers, and that of sliding ones, which is never scaled."""
    longest = positive_int(config, "max_position_embeddings")
    head_dim = positive_int(config, "head_dim")
    by_type = config.get("rope_parameters")
    if by_type is None:
        full = {"rope_theta": config.get("rope_theta") or 1e6}
        full |= {"rope_scaling": config.get("rope_scaling")}
        sliding = {"rope_theta": config.get("rope_local_base_freq") or 1e4}
    else:
        missing = [kind for kind in (FULL, SLIDING) if not isinstance(by_type.get(kind), Mapping)]
        if missing:
            raise CheckpointError(
                f"rope_parameters of the model's config lacks {', '.join(missing)}; check that "
                "the checkpoint is complete."
            )
        full, sliding = ({"rope_parameters": by_type[kind]} for kind in (FULL, SLIDING))
    return {
        "rope": read_rope(full, longest, head_dim),
        "sliding_rope": read_rope(sliding, longest, head_dim),
    }


def _soft_cap(config: Config, key: str, default: float) -> float | None:
    """Return a cap; null is none, an absent one the default."""
    return optional_float(config, key) if key in config else default


# --- windows -----------------------------------------------------------------------------------


def qwen_windows(config: Config, num_layers: int) -> Windows:
    """Return the windows of Qwen models, whose first layers attend fully."""
    # Their configs name a window and turn it off.
    if not config.get("use_sliding_window", False):
        return _full(config, num_layers)
    window = positive_int(config, "sliding_window", default=4096)
    num_full = 0
    if config.get("max_window_layers") != 0:
        num_full = min(positive_int(config, "max_window_layers", default=28), num_layers)
    defaults = [FULL] * num_full + [SLIDING] * (num_layers - num_full)
    return windows_by_layer(config, window, defaults)


def windows_by_layer(config: Config, window: int | None, defaults: Sequence[str]) -> Windows:
    """Return the sliding window of each layer by `layer_types`, or by `defaults` without them.

    Raises:
      CheckpointError: if there is another number of layer types than of layers.
      UnsupportedModelError: for a type that is not implemented, or a window that is not given.
    """
    layer_types = config.get("layer_types") or defaults
    unknown = sorted({str(kind) for kind in layer_types} - {FULL, SLIDING})
    if unknown or (SLIDING in layer_types and window is None):
        raise UnsupportedModelError(
            f"layer_types with {', '.join(unknown or [SLIDING])} are not implemented for a model "
            f"with sliding_window={window}; only full_attention is, and sliding_attention where "
            "the config turns a window on."
        )
    if len(layer_types) != len(defaults):
        raise CheckpointError(
            f"layer_types of the model's config has {len(layer_types)} entries for "
            f"{len(defaults)} layers; the checkpoint is damaged, fetch it again."
        )
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _full(config: Config, num_layers: int) -> Windows:
    return windows_by_layer(config, None, [FULL] * num_layers)


def _every(pattern: int, num_layers: int) -> list[str]:
    """Return types of which every `pattern`-th is full."""
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)]


# --- activations -------------------------------------------------------------------------------

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_activation(config: Config, default: str = "silu") -> str:
    """Return the name in `layers.ACTIVATIONS`; raises `UnsupportedModelError` if it has none."""
    name = config.get("hidden_activation") or config.get("hidden_act") or default
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act={name!r} is not implemented; supported: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]
