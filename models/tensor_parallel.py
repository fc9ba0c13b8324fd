"""`TensorParallel`: one model as equal parts, each of which a device computes as a smaller model.

A part has its share of heads, MLP features and vocabulary, and the whole residual stream. Whoever
builds it from `part` has to change nothing else: the layers at which parts meet know the mesh axis
(`paged.models.forward.split_layers`), and programs run under `shard_map`
(`paged.models.sharded_programs`; docs/decisions/0035).
"""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, model_in_full, param_shardings
from paged.models.moe_config import ExpertsConfig
from paged.models.mxfp4_weight import GROUP_SIZE
from paged.models.quantization import QuantizedLayer, quantized_layers
from paged.sharding import ShardingRules


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """How a model is split over the devices of one mesh axis.

    Where there are fewer kv heads than devices, each is held by several of them: `whole` has as
    many kv heads as there are devices, and `kv_head_copies` in a row are equal. So each device has
    one, and query heads find theirs in the same order as before. So it is with latent attention,
    whose one vector per token every device has, and computes for itself.

    Attributes:
      config: shape of the model in the checkpoint.
      size: number of devices.
      rules: logical axis -> mesh axis. Experts are split one from another if theirs has one, else
        each along its features.

    Raises:
      ValueError: if the model has no parts of equal size; the message lists the sizes that work.

    Source: Megatron-LM, arXiv:1909.08053.
    """

    config: ModelConfig
    size: int
    rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)

    def __post_init__(self) -> None:
        if reasons := self._indivisible(self.size):
            sizes = range(1, self.config.num_q_heads + 1)
            working = [str(size) for size in sizes if not self._indivisible(size)]
            raise ValueError(
                f"tensor_parallel_size={self.size} does not split {self.config.architecture} "
                f"evenly: {', '.join(reasons)}. Sizes that do: {', '.join(working)}."
            )

    @property
    def kv_head_copies(self) -> int:
        """How many devices hold each kv head of the checkpoint."""
        return max(1, self.size // self.config.num_kv_heads)

    @property
    def whole(self) -> ModelConfig:
        """Shape of the arrays over all devices together."""
        num_kv_heads = self.config.num_kv_heads * self.kv_head_copies
        return dataclasses.replace(self.config, num_kv_heads=num_kv_heads)

    @property
    def part(self) -> ModelConfig:
        """Shape of what one device computes."""
        whole = self.whole
        return dataclasses.replace(
            whole,
            experts=whole.experts and self._part_of_experts(whole.experts),
            vocab_size=whole.vocab_size // self.size,
            intermediate_size=whole.intermediate_size // self.size,
            num_q_heads=whole.num_q_heads // self.size,
            num_kv_heads=whole.num_kv_heads // self.size,
        )

    def _indivisible(self, size: int) -> list[str]:
        """Return what `size` devices cannot share evenly, as text."""
        config, experts = self.config, self.config.experts
        shared = {"num_q_heads": config.num_q_heads, "vocab_size": config.vocab_size}
        if experts is None or experts.dense_layers:
            shared["intermediate_size"] = config.intermediate_size
        if experts is not None and self.rules.experts is None:
            # MXFP4 has a scale for each group of features, which stays together.
            unit = f" / {GROUP_SIZE}" if experts.is_mxfp4 else ""
            num_units = experts.intermediate_size // (GROUP_SIZE if experts.is_mxfp4 else 1)
            shared[f"intermediate_size of the experts{unit}"] = num_units
        elif experts is not None:
            shared["num_experts"] = experts.num_experts
        if experts is not None and experts.shared_size:
            shared["features of the shared experts"] = experts.shared_size
        reasons = [f"{name}={n} is no multiple of it" for name, n in shared.items() if n % size]
        num_kv_heads = config.num_kv_heads
        if num_kv_heads % size and size % num_kv_heads:
            reasons.append(f"num_kv_heads={num_kv_heads} is neither a multiple nor a divisor of it")
        return reasons

    def check_quantized_weights(self, quantization: str | None) -> None:
        """Raise `ValueError` if a weight in fewer bits has no parts that are such weights, too.

        Args:
          quantization: see `resolve_quantization`.
        """
        if self.size == 1:
            return
        model = model_in_full(self.whole, dtype="float32")
        for layer in quantized_layers(model, quantization):
            if reason := self._indivisible_weight(layer):
                is_of_experts = layer.num_experts is not None and self.rules.experts is None
                remedy = "enable_expert_parallel, " if is_of_experts else ""
                raise ValueError(
                    f"tensor_parallel_size={self.size} does not split {layer.module} as it is "
                    f"quantised: {reason}. Use {remedy}a smaller tensor_parallel_size, down to 1, "
                    "or weights that are quantised differently."
                )

    def _indivisible_weight(self, layer: QuantizedLayer) -> str | None:
        weight, num_output_axes = layer.layer.weight, layer.num_output_axes
        assert isinstance(weight, nnx.Param)
        spec = self.rules.partition_spec(weight.get_metadata("out_sharding"))
        num_outputs, num_inputs = layer.shape
        # Whole experts are shared as they are.
        first = 0 if layer.num_experts is None else 1
        outputs, inputs = (
            self.size if any(axes) else 1
            for axes in (spec[first:num_output_axes], spec[num_output_axes:])
        )
        reason = layer.form.split_problem(num_inputs, inputs) if inputs > 1 else None
        if reason is None and layer.scheme is not None:
            reason = layer.scheme.problem(num_outputs // outputs, num_inputs // inputs)
        return reason

    def _part_of_experts(self, experts: ExpertsConfig) -> ExpertsConfig:
        experts = dataclasses.replace(experts, shared_size=experts.shared_size // self.size)
        if self.rules.experts is None:
            return dataclasses.replace(
                experts, intermediate_size=experts.intermediate_size // self.size
            )
        return dataclasses.replace(experts, num_experts_here=experts.num_experts // self.size)

    def param_shardings(
        self, mesh: Mesh, *, dtype: str, quantization: str | None = None
    ) -> nnx.State[Any, Any]:
        """Return where each parameter of `whole` lives; its slices are the parameters of `part`.

        Args:
          mesh: has `size` devices along the axis of the rules.
          dtype, quantization: see `abstract_model`.

        Raises:
          ValueError: if a slice is not what a part needs, which names the parameter.
        """
        self.check_quantized_weights(quantization)
        _, whole = abstract_model(self.whole, dtype=dtype, quantization=quantization)
        _, part = abstract_model(self.part, dtype=dtype, quantization=quantization)
        shardings = param_shardings(whole, self.rules, mesh)
        for (path, leaf), there, here in zip(
            nnx.to_flat_state(whole),
            jax.tree.leaves(shardings),
            jax.tree.leaves(part),
            strict=True,
        ):
            if there.shard_shape(leaf.shape) != here.shape:
                raise ValueError(
                    f"parameter {'.'.join(map(str, path))} of shape {list(leaf.shape)} is cut to "
                    f"{list(there.shard_shape(leaf.shape))} by {self.size} devices, but one of "
                    f"them computes with {list(here.shape)}; use tensor_parallel_size=1."
                )
        return shardings
