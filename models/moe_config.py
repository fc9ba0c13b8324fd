"""`ExpertsConfig`: the numbers of a mixture of experts."""

from dataclasses import dataclass


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
    num_experts_here: int | None = None
