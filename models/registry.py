"""`ARCHITECTURES`: for each checkpoint architecture, how to build it and where its weights lie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paged.models.decoder import DecoderLM
from paged.models.expert_source import arrange_gpt_oss, stack_experts
from paged.models.tensor_source import TensorSource
from paged.models.text_part import text_tensors


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where one parameter lies in a checkpoint, in every layer.

    Parameters whose rules name one tensor lie side by side in it, along its first axis, in the
    order of the rules.

    Attributes:
      path: path of the parameter in the model, dotted; `*` is the layer number.
      name: name of the tensor in the checkpoint; `*` is the same number.
      heads_axis: axis of the tensor that holds heads and head_dim as one, which the parameter
        splits in two; None if both have the same shape.
      is_part_of_head: parameters of the same tensor lie side by side in each head of its first
        axis, not one after the other.
    """

    path: str
    name: str
    heads_axis: int | None = None
    is_part_of_head: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the engine knows about one name in `architectures` of a config.

    Attributes:
      build: called as `DecoderLM` is.
      weight_rules: one row per parameter that some config of this architecture has.
      models: what is published under this name, for people.
      notes: what sets it apart, for people.
      arrange: makes of a checkpoint's tensors those that the rules name; None: they do already.
    """

    build: Callable[..., DecoderLM]
    weight_rules: tuple[WeightRule, ...]
    models: str
    notes: str
    arrange: Callable[[TensorSource], TensorSource] | None = None


_ATTENTION, _MLP = "model.layers.*.self_attn", "model.layers.*.mlp"

_TOP = (
    WeightRule("embed.weight", "model.embed_tokens.weight"),
    WeightRule("norm.weight", "model.norm.weight"),
    WeightRule("lm_head.weight", "lm_head.weight"),
)
_ATTENTION_RULES = (
    WeightRule("layers.*.attention.q_proj.weight", f"{_ATTENTION}.q_proj.weight", 0),
    WeightRule("layers.*.attention.k_proj.weight", f"{_ATTENTION}.k_proj.weight", 0),
    WeightRule("layers.*.attention.v_proj.weight", f"{_ATTENTION}.v_proj.weight", 0),
    WeightRule("layers.*.attention.o_proj.weight", f"{_ATTENTION}.o_proj.weight", 1),
    WeightRule("layers.*.attention.q_proj.bias", f"{_ATTENTION}.q_proj.bias", 0),
    WeightRule("layers.*.attention.k_proj.bias", f"{_ATTENTION}.k_proj.bias", 0),
    WeightRule("layers.*.attention.v_proj.bias", f"{_ATTENTION}.v_proj.bias", 0),
    WeightRule("layers.*.attention.o_proj.bias", f"{_ATTENTION}.o_proj.bias"),
)
_LATENT_ATTENTION_RULES = (
    WeightRule("layers.*.attention.q_proj.weight", f"{_ATTENTION}.q_proj.weight", 0),
    WeightRule("layers.*.attention.q_down_proj.weight", f"{_ATTENTION}.q_a_proj.weight"),
    WeightRule("layers.*.attention.q_down_proj.bias", f"{_ATTENTION}.q_a_proj.bias"),
    WeightRule("layers.*.attention.q_norm.weight", f"{_ATTENTION}.q_a_layernorm.weight"),
    WeightRule("layers.*.attention.q_up_proj.weight", f"{_ATTENTION}.q_b_proj.weight", 0),
    WeightRule("layers.*.attention.kv_down_proj.weight", f"{_ATTENTION}.kv_a_proj_with_mqa.weight"),
    WeightRule("layers.*.attention.kv_down_proj.bias", f"{_ATTENTION}.kv_a_proj_with_mqa.bias"),
    WeightRule("layers.*.attention.kv_norm.weight", f"{_ATTENTION}.kv_a_layernorm.weight"),
    WeightRule("layers.*.attention.k_up", f"{_ATTENTION}.kv_b_proj.weight", 0, True),
    WeightRule("layers.*.attention.v_up", f"{_ATTENTION}.kv_b_proj.weight", 0, True),
    WeightRule("layers.*.attention.o_proj.weight", f"{_ATTENTION}.o_proj.weight", 1),
    WeightRule("layers.*.attention.o_proj.bias", f"{_ATTENTION}.o_proj.bias"),
)
_FUSED_ATTENTION_RULES = (
    WeightRule("layers.*.attention.q_proj.weight", f"{_ATTENTION}.qkv_proj.weight", 0),
    WeightRule("layers.*.attention.k_proj.weight", f"{_ATTENTION}.qkv_proj.weight", 0),
    WeightRule("layers.*.attention.v_proj.weight", f"{_ATTENTION}.qkv_proj.weight", 0),
    WeightRule("layers.*.attention.o_proj.weight", f"{_ATTENTION}.o_proj.weight", 1),
)
_HEAD_NORM_RULES = (
    WeightRule("layers.*.attention.q_norm.weight", f"{_ATTENTION}.q_norm.weight"),
    WeightRule("layers.*.attention.k_norm.weight", f"{_ATTENTION}.k_norm.weight"),
)
_ALL_HEADS_NORM_RULES = (
    WeightRule("layers.*.attention.q_norm.weight", f"{_ATTENTION}.q_norm.weight", 0),
    WeightRule("layers.*.attention.k_norm.weight", f"{_ATTENTION}.k_norm.weight", 0),
)
_MLP_RULES = (
    WeightRule("layers.*.mlp.gate_proj.weight", f"{_MLP}.gate_proj.weight"),
    WeightRule("layers.*.mlp.up_proj.weight", f"{_MLP}.up_proj.weight"),
    WeightRule("layers.*.mlp.down_proj.weight", f"{_MLP}.down_proj.weight"),
    WeightRule("layers.*.mlp.gate_proj.bias", f"{_MLP}.gate_proj.bias"),
    WeightRule("layers.*.mlp.up_proj.bias", f"{_MLP}.up_proj.bias"),
    WeightRule("layers.*.mlp.down_proj.bias", f"{_MLP}.down_proj.bias"),
)
_FUSED_MLP_RULES = (
    WeightRule("layers.*.mlp.gate_proj.weight", f"{_MLP}.gate_up_proj.weight"),
    WeightRule("layers.*.mlp.up_proj.weight", f"{_MLP}.gate_up_proj.weight"),
    WeightRule("layers.*.mlp.down_proj.weight", f"{_MLP}.down_proj.weight"),
)


def _norms(**names: str) -> tuple[WeightRule, ...]:
    """Return rules for norms of a layer, by the name of the parameter."""
    return tuple(
        WeightRule(f"layers.*.{path}.weight", f"model.layers.*.{name}.weight")
        for path, name in names.items()
    )


# "post_attention_layernorm" is what comes after the attention block: the norm before the MLP where
# norms are before, that of the attention's output elsewhere.
_NORMS_BEFORE = _norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
_NORMS_AFTER = _norms(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)
_NORMS_AROUND = (
    *_norms(attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
    *_NORMS_AFTER,
)
_LLAMA = (*_TOP, *_NORMS_BEFORE, *_ATTENTION_RULES, *_MLP_RULES)
_QWEN3 = (*_LLAMA, *_HEAD_NORM_RULES)
_GEMMA2 = (*_TOP, *_NORMS_AROUND, *_ATTENTION_RULES, *_MLP_RULES)
_GEMMA3 = (*_GEMMA2, *_HEAD_NORM_RULES)
_PHI3 = (*_TOP, *_NORMS_BEFORE, *_FUSED_ATTENTION_RULES, *_FUSED_MLP_RULES)
_OLMO2 = (*_TOP, *_NORMS_AFTER, *_ATTENTION_RULES, *_ALL_HEADS_NORM_RULES, *_MLP_RULES)

_EXPERTS, _SPARSE = "layers.*.mlp.experts", "model.layers.*.block_sparse_moe"
_MIXTRAL_MLP_RULES = (
    WeightRule("layers.*.mlp.router.weight", f"{_SPARSE}.gate.weight"),
    WeightRule(f"{_EXPERTS}.gate_proj.weight", f"{_SPARSE}.experts.w1.weight"),
    WeightRule(f"{_EXPERTS}.up_proj.weight", f"{_SPARSE}.experts.w3.weight"),
    WeightRule(f"{_EXPERTS}.down_proj.weight", f"{_SPARSE}.experts.w2.weight"),
)
_QWEN3_EXPERT_RULES = (
    WeightRule("layers.*.mlp.router.weight", f"{_MLP}.gate.weight"),
    WeightRule(f"{_EXPERTS}.gate_proj.weight", f"{_MLP}.experts.gate_proj.weight"),
    WeightRule(f"{_EXPERTS}.up_proj.weight", f"{_MLP}.experts.up_proj.weight"),
    WeightRule(f"{_EXPERTS}.down_proj.weight", f"{_MLP}.experts.down_proj.weight"),
)


def _gpt_oss_experts(layer: str, tensor: str, part: str) -> tuple[WeightRule, ...]:
    """Return rules for one linear layer of gpt-oss' experts, plain and in MXFP4."""
    path, name = f"{_EXPERTS}.{layer}", f"{_MLP}.experts.{tensor}"
    return (
        WeightRule(f"{path}.weight", f"{name}{part}"),
        WeightRule(f"{path}.weight.values", f"{name}_blocks{part}"),
        WeightRule(f"{path}.weight.scales", f"{name}_scales{part}"),
        WeightRule(f"{path}.bias", f"{name}_bias{part}"),
    )


_GPT_OSS_MLP_RULES = (
    WeightRule("layers.*.mlp.router.weight", f"{_MLP}.router.weight"),
    WeightRule("layers.*.mlp.router.bias", f"{_MLP}.router.bias"),
    *_gpt_oss_experts("gate_proj", "gate_up_proj", ":gate"),
    *_gpt_oss_experts("up_proj", "gate_up_proj", ":up"),
    *_gpt_oss_experts("down_proj", "down_proj", ":down"),
)
_DEEPSEEK_MLP_RULES = (
    *_MLP_RULES,
    *_QWEN3_EXPERT_RULES,
    WeightRule("layers.*.mlp.router.choice_bias", f"{_MLP}.gate.e_score_correction_bias"),
    *(
        WeightRule(f"layers.*.mlp.shared.{layer}.weight", f"{_MLP}.shared_experts.{layer}.weight")
        for layer in ("gate_proj", "up_proj", "down_proj")
    ),
)
_SINK_RULES = (WeightRule("layers.*.attention.sinks", f"{_ATTENTION}.sinks"),)
_MIXTRAL = (*_TOP, *_NORMS_BEFORE, *_ATTENTION_RULES, *_MIXTRAL_MLP_RULES)
_QWEN3_MOE = (*_QWEN3, *_QWEN3_EXPERT_RULES)
_DEEPSEEK = (*_TOP, *_NORMS_BEFORE, *_LATENT_ATTENTION_RULES, *_DEEPSEEK_MLP_RULES)
_GPT_OSS = (*_TOP, *_NORMS_BEFORE, *_ATTENTION_RULES, *_SINK_RULES, *_GPT_OSS_MLP_RULES)

ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(
        DecoderLM,
        _DEEPSEEK,
        "DeepSeek V2, V2.5, V2-Lite, Coder V2",
        "latent attention, experts chosen by groups, shared experts",
        stack_experts,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        DecoderLM,
        _DEEPSEEK,
        "DeepSeek V3, R1; Moonlight, Kimi K2 (with a tokenizer.json)",
        "latent attention, experts chosen by sigmoids with a bias, shared experts",
        stack_experts,
    ),
    "Gemma2ForCausalLM": Architecture(
        DecoderLM,
        _GEMMA2,
        "Gemma 2",
        "soft caps, norms around each block, a window in every other layer",
    ),
    "Gemma3ForCausalLM": Architecture(
        DecoderLM,
        _GEMMA3,
        "Gemma 3 (text)",
        "q and k norms, windows in five of six layers, two rotary embeddings",
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        DecoderLM, _GEMMA3, "Gemma 3 (4B and larger)", "text only", text_tensors
    ),
    "GptOssForCausalLM": Architecture(
        DecoderLM,
        _GPT_OSS,
        "gpt-oss",
        "experts (MXFP4 stays packed), attention sinks, a window in every other layer",
        arrange_gpt_oss,
    ),
    "GraniteForCausalLM": Architecture(
        DecoderLM,
        _LLAMA,
        "Granite 3 (dense)",
        "multipliers of embedding, attention, residual and logits",
    ),
    "LlamaForCausalLM": Architecture(
        DecoderLM,
        _LLAMA,
        "Llama 2 and 3, SmolLM2, TinyLlama, Yi",
        "rotary scaling of Llama 3.1, linear, dynamic, yarn",
    ),
    "MistralForCausalLM": Architecture(
        DecoderLM, _LLAMA, "Mistral", "a window in every layer, or none"
    ),
    "Mistral3ForConditionalGeneration": Architecture(
        DecoderLM, _LLAMA, "Mistral Small 3.1 and 3.2", "text only", text_tensors
    ),
    "MixtralForCausalLM": Architecture(DecoderLM, _MIXTRAL, "Mixtral", "experts", stack_experts),
    "Olmo2ForCausalLM": Architecture(
        DecoderLM, _OLMO2, "OLMo 2", "norms after each block, q and k norms over all heads"
    ),
    "Phi3ForCausalLM": Architecture(
        DecoderLM,
        _PHI3,
        "Phi-3, Phi-3.5, Phi-4 (mini, too)",
        "fused projections, rotation of a part of the head, longrope",
    ),
    "Qwen2ForCausalLM": Architecture(
        DecoderLM, _LLAMA, "Qwen2, Qwen2.5", "biases on q, k and v, windows in upper layers"
    ),
    "Qwen2VLForConditionalGeneration": Architecture(
        DecoderLM, _LLAMA, "Qwen2-VL", "text only", text_tensors
    ),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        DecoderLM, _LLAMA, "Qwen2.5-VL", "text only", text_tensors
    ),
    "Qwen3ForCausalLM": Architecture(
        DecoderLM, _QWEN3, "Qwen3 (dense)", "q and k norms, head size of its own"
    ),
    "Qwen3MoeForCausalLM": Architecture(
        DecoderLM,
        _QWEN3_MOE,
        "Qwen3 (experts)",
        "experts, dense layers among them, q and k norms",
        stack_experts,
    ),
    "Qwen3VLForConditionalGeneration": Architecture(
        DecoderLM, _QWEN3, "Qwen3-VL (dense)", "text only", text_tensors
    ),
}


def tensor_name(architecture: str, path: Sequence[Any]) -> str:
    """Return the checkpoint's name for the tensor of the parameter at a path of the model."""
    layer = next((str(key) for key in path if isinstance(key, int)), "")
    dotted = ".".join("*" if isinstance(key, int) else str(key) for key in path)
    rules = ARCHITECTURES[architecture].weight_rules
    return next(rule.name for rule in rules if rule.path == dotted).replace("*", layer)
