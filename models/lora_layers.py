"""`LoRALayer`: which linear layers of a model adapters may change, and what files call them."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from flax import nnx

from paged.models.config import ModelConfig
from paged.models.forward import model_in_full
from paged.models.layers import Linear
from paged.models.registry import ARCHITECTURES, tensor_name


@dataclass(frozen=True, slots=True)
class LoRALayer:
    """One linear layer, and where an adapter's file has its matrices.

    Attributes:
      path: of the layer in the model, dotted.
      module: name of the checkpoint's module; several layers share one that is fused.
      outputs, inputs: name and size of each axis of the weight.
      start: first of the module's outputs that is this layer's.
    """

    path: str
    module: str
    outputs: dict[str, int]
    inputs: dict[str, int]
    start: int = 0

    @property
    def num_outputs(self) -> int:
        """Rows of B that are this layer's."""
        return math.prod(self.outputs.values())

    @property
    def num_inputs(self) -> int:
        """Columns of A."""
        return math.prod(self.inputs.values())

    @property
    def kind(self) -> str:
        """Last part of the module's name, such as "q_proj"."""
        return self.module.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class AdaptableModel:
    """What adapters may change of a model.

    Attributes:
      architecture: of the model.
      layers: in the order of the model.
      modules: names of all that has a weight, adaptable or not; those of experts without numbers.
    """

    architecture: str
    layers: tuple[LoRALayer, ...]
    modules: frozenset[str] = field(default=frozenset(), repr=False)

    @classmethod
    def of(
        cls, config: ModelConfig, target_modules: Collection[str] | None = None
    ) -> "AdaptableModel":
        """Return the linear layers of a model, its router and its experts not among them.

        Args:
          config: shape of the model.
          target_modules: kinds of layers to be kept, such as "q_proj"; None: all.

        Raises:
          ValueError: if the model has no layers of such a kind.
        """
        layers = _linear_layers(config)
        kinds = list(dict.fromkeys(layer.kind for layer in layers))
        if unknown := set(target_modules or ()) - set(kinds):
            raise ValueError(
                f"lora_target_modules names {', '.join(sorted(unknown))}, but the linear layers of "
                f"{config.architecture} are {', '.join(kinds)}."
            )
        kept = [layer for layer in layers if target_modules is None or layer.kind in target_modules]
        rules = ARCHITECTURES[config.architecture].weight_rules
        modules = {
            rule.name.removesuffix(".weight").replace("*", str(number))
            for rule in rules
            for number in range(config.num_layers)
        }
        return cls(config.architecture, tuple(kept), frozenset(modules))

    def by_module(self) -> dict[str, list[LoRALayer]]:
        """Return the layers of each module of the checkpoint."""
        modules: dict[str, list[LoRALayer]] = {}
        for layer in self.layers:
            modules.setdefault(layer.module, []).append(layer)
        return modules

    def has_weight(self, module: str) -> bool:
        """Return whether the model has a weight of this name at all, adaptable or not."""
        return re.sub(r"(\.experts)\.\d+", r"\1", module) in self.modules


def _linear_layers(config: ModelConfig) -> list[LoRALayer]:
    model = model_in_full(config, dtype="float32")
    rules = ARCHITECTURES[config.architecture].weight_rules
    order = {rule.path: number for number, rule in enumerate(rules)}
    found: list[tuple[LoRALayer, int]] = []
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, Linear):
            continue
        assert isinstance(module.weight, nnx.Param)
        names = module.weight.get_metadata("out_sharding")
        axes = list(zip(names, module.weight.shape, strict=True))
        num_outputs = len(module.output_shape)
        name = tensor_name(config.architecture, (*path, "weight")).removesuffix(".weight")
        generic = ".".join("*" if isinstance(key, int) else str(key) for key in path)
        layer = LoRALayer(
            ".".join(map(str, path)), name, dict(axes[:num_outputs]), dict(axes[num_outputs:])
        )
        found.append((layer, order[f"{generic}.weight"]))
    return _placed(found)


def _placed(found: list[tuple[LoRALayer, int]]) -> list[LoRALayer]:
    """Return the layers, each behind those before it in its module, in the order of the rules."""
    ends: dict[str, int] = {}
    starts: dict[str, int] = {}
    for layer, _ in sorted(found, key=lambda pair: pair[1]):
        starts[layer.path] = ends.get(layer.module, 0)
        ends[layer.module] = starts[layer.path] + layer.num_outputs
    return [
        LoRALayer(layer.path, layer.module, layer.outputs, layer.inputs, starts[layer.path])
        for layer, _ in found
    ]
