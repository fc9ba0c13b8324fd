"""`GGUF_FAMILIES`: for each GGUF architecture, what it is in Hugging Face's terms.

Source: llama.cpp's convert_hf_to_gguf.py, and the constants that its models have in code where a
file does not say them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paged.models.gguf_keys import Keys

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ROUTED = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_QWEN3_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Under the names that `arrange_gpt_oss` gives: gates are apart here, too.
_GPT_OSS_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj:gate",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj:up",
    "ffn_down_exps.weight": "mlp.experts.down_proj:down",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias:gate",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias:up",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias:down",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA = _NORMS_BEFORE | _ATTENTION | _MLP
_GEMMA2 = (
    {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    | _NORMS_AFTER
    | _ATTENTION
    | _MLP
)
_PHI3 = _NORMS_BEFORE | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def _nothing(_keys: Keys, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """What a GGUF architecture is in Hugging Face's terms.

    Attributes:
      architecture: name in `architectures` of a config.
      layer_tensors: base names of the tensors of a layer -> Hugging Face's, below the layer. Of
        experts there is one tensor, in some old files one for each.
      whole_names: names of such tensors with their endings -> Hugging Face's, which count first.
      keeps_mxfp4: experts in MXFP4 stay in it.
      pairs_rows: rows of q and k are in llama.cpp's rotary layout.
      adds_one: 1 has been added to the weights of norms.
      extra_keys: keys beyond the common ones that `read` looks at, and that may so have a value.
      read: from the keys and the common part of the config to what this family adds to it.
    """

    architecture: str
    layer_tensors: Mapping[str, str]
    whole_names: Mapping[str, str] = field(default_factory=dict)
    keeps_mxfp4: bool = False
    pairs_rows: bool = False
    adds_one: bool = False
    extra_keys: tuple[str, ...] = ()
    read: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = _nothing


def _gemma(keys: Keys, config: Mapping[str, Any], layers_of_27b: int) -> dict[str, Any]:
    # The query scale is the head size but in the 27B models; files do not say it.
    width = config["head_dim"]
    if config["num_hidden_layers"] == layers_of_27b:
        width = config["hidden_size"] // config["num_attention_heads"]
    if scale := keys.get("attention.scale", 0.0):
        width = scale**-2
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "sliding_window": keys.count("attention.sliding_window"),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 0.0),
    }


def _gemma2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    cap = keys.get("attn_logit_softcapping", 50.0)
    return {
        **_gemma(keys, config, layers_of_27b=46),
        "attn_logit_softcapping": cap,
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(keys, config, layers_of_27b=62),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
    }


def _phi3(keys: Keys, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.get("attention.sliding_window", 0) or None}


def _granite(keys: Keys, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": keys["attention.scale"],
        "embedding_multiplier": keys["embedding_scale"],
        "residual_multiplier": keys["residual_scale"],
        "logits_scaling": keys["logit_scale"],
    }


def _mixtral(keys: Keys, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


def _qwen3_moe(keys: Keys, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gpt_oss(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_scaling": scaling and scaling | {"truncate": False},
    }


GGUF_FAMILIES: dict[str, GGUFFamily] = {
    "gemma2": GGUFFamily(
        "Gemma2ForCausalLM",
        _GEMMA2,
        adds_one=True,
        extra_keys=("attention.sliding_window", "attention.scale"),
        read=_gemma2,
    ),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM",
        _GEMMA2 | _HEAD_NORMS,
        adds_one=True,
        extra_keys=("attention.sliding_window", "attention.scale"),
        read=_gemma3,
    ),
    "granite": GGUFFamily(
        "GraniteForCausalLM",
        _LLAMA,
        pairs_rows=True,
        extra_keys=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        read=_granite,
    ),
    # Mistral, too: the converter makes no difference.
    "llama": GGUFFamily("LlamaForCausalLM", _LLAMA, pairs_rows=True),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", _NORMS_AFTER | _ATTENTION | _HEAD_NORMS | _MLP),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM",
        _PHI3,
        extra_keys=("attention.sliding_window", "rope.scaling.attn_factor"),
        read=_phi3,
    ),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", _LLAMA),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", _LLAMA | _HEAD_NORMS),
}
"""GGUF architecture -> what a file of it is that has no experts."""

GGUF_MIXTURES: dict[str, GGUFFamily] = {
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM",
        {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | _ATTENTION
        | {"ffn_gate_inp": "mlp.router"},
        whole_names=_GPT_OSS_WHOLE,
        keeps_mxfp4=True,
        extra_keys=("expert_count", "attention.sliding_window"),
        read=_gpt_oss,
    ),
    "llama": GGUFFamily(
        "MixtralForCausalLM",
        _NORMS_BEFORE | _ATTENTION | _ROUTED,
        pairs_rows=True,
        extra_keys=("expert_count",),
        read=_mixtral,
    ),
    "qwen3moe": GGUFFamily(
        "Qwen3MoeForCausalLM",
        _NORMS_BEFORE | _ATTENTION | _HEAD_NORMS | _QWEN3_ROUTED,
        extra_keys=("expert_count",),
        read=_qwen3_moe,
    ),
}
"""The same of files that have experts."""
