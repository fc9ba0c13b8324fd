"""`ARCHITECTURES`: for each checkpoint architecture, how to build it and where its weights lie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paged.models.decoder import DecoderLM


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where one parameter lies in a checkpoint, in every layer.

    Attributes:
      path: path of the parameter in the model, dotted; `*` is the layer number.
      name: name of the tensor in the checkpoint; `*` is the same number.
      heads_axis: axis of the tensor that holds heads and head_dim as one, which the parameter
        splits in two; None if both have the same shape.
    """

    path: str
    name: str
    heads_axis: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the engine knows about one name in `architectures` of a config.

    Attributes:
      build: called as `DecoderLM` is.
      weight_rules: one row per parameter that some config of this architecture has.
    """

    build: Callable[..., DecoderLM]
    weight_rules: tuple[WeightRule, ...]


_ATTENTION, _MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
_DECODER_RULES = (
    WeightRule("embed.weight", "model.embed_tokens.weight"),
    WeightRule("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    WeightRule("layers.*.attention.q_proj.weight", f"{_ATTENTION}.q_proj.weight", 0),
    WeightRule("layers.*.attention.k_proj.weight", f"{_ATTENTION}.k_proj.weight", 0),
    WeightRule("layers.*.attention.v_proj.weight", f"{_ATTENTION}.v_proj.weight", 0),
    WeightRule("layers.*.attention.o_proj.weight", f"{_ATTENTION}.o_proj.weight", 1),
    WeightRule("layers.*.attention.q_proj.bias", f"{_ATTENTION}.q_proj.bias", 0),
    WeightRule("layers.*.attention.k_proj.bias", f"{_ATTENTION}.k_proj.bias", 0),
    WeightRule("layers.*.attention.v_proj.bias", f"{_ATTENTION}.v_proj.bias", 0),
    WeightRule("layers.*.attention.o_proj.bias", f"{_ATTENTION}.o_proj.bias"),
    WeightRule("layers.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    WeightRule("layers.*.mlp.gate_proj.weight", f"{_MLP}.gate_proj.weight"),
    WeightRule("layers.*.mlp.up_proj.weight", f"{_MLP}.up_proj.weight"),
    WeightRule("layers.*.mlp.down_proj.weight", f"{_MLP}.down_proj.weight"),
    WeightRule("layers.*.mlp.gate_proj.bias", f"{_MLP}.gate_proj.bias"),
    WeightRule("layers.*.mlp.up_proj.bias", f"{_MLP}.up_proj.bias"),
    WeightRule("layers.*.mlp.down_proj.bias", f"{_MLP}.down_proj.bias"),
    WeightRule("norm.weight", "model.norm.weight"),
    WeightRule("lm_head.weight", "lm_head.weight"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(DecoderLM, _DECODER_RULES),
    "MistralForCausalLM": Architecture(DecoderLM, _DECODER_RULES),
    "Qwen2ForCausalLM": Architecture(DecoderLM, _DECODER_RULES),
}


def weight_rule(architecture: str, path: Sequence[Any]) -> WeightRule:
    """Return the rule for the parameter at a path of the model, in whichever layer it is."""
    dotted = ".".join("*" if isinstance(key, int) else str(key) for key in path)
    rules = ARCHITECTURES[architecture].weight_rules
    return next(rule for rule in rules if rule.path == dotted)


def tensor_name(architecture: str, path: Sequence[Any]) -> str:
    """Return the checkpoint's name for the tensor of the parameter at a path of the model."""
    layer = next((str(key) for key in path if isinstance(key, int)), "")
    return weight_rule(architecture, path).name.replace("*", layer)
