"""`ExpertsConfig`: the numbers of a mixture of experts, and how `config.json` gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.models.config_values import natural_int, positive_float, positive_int
from paged.models.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class GroupRouting:
    """How DeepSeek's models choose: some groups of experts, then experts of these.

    Attributes:
      is_sigmoid: scores are the sigmoid of each logit; else a softmax over all.
      num_groups: groups of as many experts each, in order; 1: none.
      num_chosen_groups: groups of which experts may be chosen.
      has_bias: a bias of each expert is added to its score for the choice alone, and a group is as
        good as its two best experts together; else it is as good as its best.
      scale: of the scores of what is chosen.

    Sources: DeepSeek-V2, arXiv:2405.04434, section 2.2; DeepSeek-V3, arXiv:2412.19437, section 2.1.
    """

    is_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    has_bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The shape of the sparse layers of a model; hashable, like `ModelConfig`.

    Attributes:
      num_experts: MLPs of a layer.
      num_experts_per_token: how many of them a token passes through.
      intermediate_size: features of one of them.
      normalize: the scores of the chosen experts are a softmax over the chosen; else over all.
        With `routing`, they are divided by their sum.
      router_bias, expert_bias: the router, and the projections of the experts, have biases.
      activation: "silu", or "clamped_swiglu" with `swiglu_alpha` and `swiglu_limit`.
      swiglu_alpha: factor within the sigmoid.
      swiglu_limit: what gates and values are clamped to.
      dense_layers: layers that have an ordinary MLP instead.
      is_mxfp4: the weights of the experts are stored in MXFP4.
      num_experts_here: how many of the experts one device has, where they are split over several;
        None: all.
      routing: the choice of experts, if it is made by groups, sigmoids or with a scale.
      shared_size: features of an MLP beside the experts that every token passes through; 0: none.
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
    routing: GroupRouting | None = None
    shared_size: int = 0

    def __post_init__(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            raise CheckpointError(
                f"num_experts_per_tok={self.num_experts_per_token} of the model's config exceeds "
                f"its {self.num_experts} experts; check that the checkpoint is complete."
            )
        if self.routing is not None:
            self._check_groups(self.routing)

    def _check_groups(self, routing: GroupRouting) -> None:
        groups, chosen = routing.num_groups, routing.num_chosen_groups
        if self.num_experts % groups or chosen > groups:
            raise CheckpointError(
                f"n_group={groups} of the model's config must divide its {self.num_experts} "
                f"experts, and topk_group={chosen} must not exceed it; check that the checkpoint "
                "is complete."
            )
        if self.num_experts_per_token > chosen * (self.num_experts // groups):
            raise CheckpointError(
                f"num_experts_per_tok={self.num_experts_per_token} of the model's config exceeds "
                f"the experts of topk_group={chosen} of its {groups} groups; check that the "
                "checkpoint is complete."
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


def read_deepseek_v2_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the mixture of a DeepSeek V2 model."""
    _refuse_others(
        config,
        {
            "topk_method": (None, "greedy", "group_limited_greedy"),
            "scoring_func": (None, "softmax"),
            # Published code either divides by the sum or multiplies by the scale, transformers does
            # the latter alone; no published checkpoint says so.
            "norm_topk_prob": (None, False),
            "moe_layer_freq": (None, 1),
        },
    )
    has_groups = config.get("topk_method") == "group_limited_greedy"
    routing = GroupRouting(
        num_groups=positive_int(config, "n_group") if has_groups else 1,
        num_chosen_groups=positive_int(config, "topk_group") if has_groups else 1,
        scale=positive_float(config, "routed_scaling_factor", default=1.0),
    )
    return _deepseek_experts(config, num_layers, routing, num_shared=2, num_dense=0)


def read_deepseek_v3_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the mixture of a DeepSeek V3 model."""
    _refuse_others(
        config,
        {
            "topk_method": (None, "noaux_tc"),
            "scoring_func": (None, "sigmoid"),
            "moe_layer_freq": (None, 1),
        },
    )
    routing = GroupRouting(
        is_sigmoid=True,
        num_groups=positive_int(config, "n_group", default=8),
        num_chosen_groups=positive_int(config, "topk_group", default=4),
        has_bias=True,
        scale=positive_float(config, "routed_scaling_factor", default=2.5),
    )
    normalize = config.get("norm_topk_prob") is not False
    return _deepseek_experts(
        config, num_layers, routing, num_shared=1, num_dense=3, normalize=normalize
    )


def _deepseek_experts(
    config: Mapping[str, Any],
    num_layers: int,
    routing: GroupRouting,
    *,
    num_shared: int,
    num_dense: int,
    normalize: bool = False,
) -> ExpertsConfig:
    """Return a mixture; of shared experts and of dense layers there are such numbers by default."""
    size = positive_int(config, "moe_intermediate_size")
    num_dense = natural_int(config, "first_k_dense_replace", num_dense)
    return ExpertsConfig(
        num_experts=positive_int(config, "n_routed_experts"),
        num_experts_per_token=positive_int(config, "num_experts_per_tok"),
        intermediate_size=size,
        normalize=normalize,
        dense_layers=tuple(range(min(num_dense, num_layers))),
        routing=routing,
        shared_size=size * natural_int(config, "n_shared_experts", num_shared),
    )


def _refuse_others(config: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    others = [f"{key}={config[key]!r}" for key in known if config.get(key) not in known[key]]
    if others:
        listed = "; ".join(
            f"{key} of {', '.join(repr(value) for value in values if value is not None)}"
            for key, values in known.items()
        )
        raise UnsupportedModelError(
            f"{', '.join(others)}: this routing is not implemented for the model's architecture; "
            f"supported: {listed}."
        )
