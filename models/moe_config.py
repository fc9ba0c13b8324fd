"""`ExpertsConfig`: the numbers of a mixture of experts, and how `config.json` gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.models.config_values import positive_float, positive_int
from paged.models.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The shape of the sparse layers of a model; hashable, like `ModelConfig`.

    Attributes:
      num_experts: MLPs of a layer.
      num_experts_per_token: how many of them a token passes through.
      intermediate_size: features of one of them.
      normalize: the scores of the chosen experts are a softmax over the chosen; else over all.
      router_bias, expert_bias: the router, and the projections of the experts, have biases.
      activation: "silu", or "clamped_swiglu" with `swiglu_alpha` and `swiglu_limit`.
      swiglu_alpha: factor within the sigmoid.
      swiglu_limit: what gates and values are clamped to.
      dense_layers: layers that have an ordinary MLP instead.
      is_mxfp4: the weights of the experts are stored in MXFP4.
      num_experts_here: how many of the experts one device has, where they are split over several;
        None: all.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    activation: str = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    dense_layers: tuple[int, ...] = ()
    is_mxfp4: bool = False
    num_experts_here: int | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            raise CheckpointError(
                f"num_experts_per_tok={self.num_experts_per_token} of the model's config exceeds "
                f"its {self.num_experts} experts; check that the checkpoint is complete."
            )


# Keys that mean another way of routing, and the values that mean none.
_OTHER_ROUTING: dict[str, tuple[Any, ...]] = {
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "n_group": (None, 0, 1),
    "topk_group": (None, 0, 1),
    "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1, 1.0),
    "moe_layer_freq": (None, 1),
}


def read_experts(config: Mapping[str, Any], **further: Any) -> ExpertsConfig:
    """Return the mixture that a config describes.

    Args:
      config: a `config.json`.
      further: fields of `ExpertsConfig` that the architecture decides.

    Raises:
      CheckpointError: if a key is missing or its value cannot be.
      UnsupportedModelError: if the routing is not implemented.
    """
    others = {
        key: config.get(key) for key, none in _OTHER_ROUTING.items() if config.get(key) not in none
    }
    if others:
        listed = ", ".join(f"{key}={value!r}" for key, value in others.items())
        raise UnsupportedModelError(
            f"{listed}: this routing is not implemented; supported: num_experts_per_tok of all "
            "experts by a softmax of their scores (norm_topk_prob or not), without shared "
            "experts, groups or a scaling factor."
        )
    # transformers writes either name for the same.
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    fields: dict[str, Any] = {
        "num_experts": positive_int(config, key),
        "num_experts_per_token": positive_int(config, "num_experts_per_tok"),
        "intermediate_size": positive_int(config, "intermediate_size"),
    }
    return ExpertsConfig(**fields | further)


def read_qwen3_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the mixture of a Qwen3 MoE model, some of whose layers may be dense."""
    step = positive_int(config, "decoder_sparse_step", default=1)
    dense = set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return read_experts(
        config,
        intermediate_size=positive_int(config, "moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(sorted(dense)),
    )


def read_gpt_oss_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Return the mixture of a gpt-oss model."""
    return read_experts(
        config,
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        swiglu_alpha=positive_float(config, "swiglu_alpha", default=1.702),
        swiglu_limit=positive_float(config, "swiglu_limit", default=7.0),
        is_mxfp4=config.get("quantization_config") is not None,
    )
