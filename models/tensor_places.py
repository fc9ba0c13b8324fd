"""`match_tensors`: where each parameter lies in a checkpoint, or all that does not fit."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx

from paged.models.config import DTYPES, ModelConfig
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.host_memory import empty_array
from paged.models.quantization import QuantizedLayer
from paged.models.quantized.checkpoint_format import LayerScheme
from paged.models.quantized.reading import layer_tensors, read_layer, same_shape, widen_layer
from paged.models.registry import ARCHITECTURES, WeightRule
from paged.models.tensor_source import TensorSource

logger = logging.getLogger(__name__)

# Buffers that old checkpoints store and that follow from the config.
_IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a parameter lies: a range of a tensor's first axis; `stop` is None for all of it.

    Attributes:
      name: of the tensor; that of a quantised layer has parts, whose names begin alike.
      shape: of the parameter.
      stored: shape of the whole tensor, if it were not quantised.
      start, stop: the range.
      is_packed: the parameter itself is of bytes that hold several weights.
      num_heads: the range is one of the outputs of each head, of so many; None: of all outputs.
      scheme: the tensor is stored in fewer bits, so, and the parameter is not; None: in full.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    start: int = 0
    stop: int | None = None
    is_packed: bool = False
    num_heads: int | None = None
    scheme: LayerScheme | None = None

    def read(self, source: TensorSource) -> np.ndarray:
        """Return the parameter's values, in its shape.

        Raises:
          CheckpointError: if they are of no type that parameters may have.
        """
        values = self._widened(source, self.scheme) if self.scheme else source.read(self.name)
        if str(values.dtype) not in DTYPES and not self.is_packed:
            raise CheckpointError(
                f"tensor {self.name} has element type {values.dtype}; only {', '.join(DTYPES)} can "
                "be read where the checkpoint's config names no quantization for it. Use another "
                "checkpoint."
            )
        if self.num_heads is not None:
            by_head = values.reshape(self.num_heads, -1, *values.shape[1:])
            return by_head[:, self.start : self.stop].reshape(self.shape)
        part = values if self.stop is None else values[self.start : self.stop]
        return part.reshape(self.shape)

    def _widened(self, source: TensorSource, scheme: LayerScheme) -> np.ndarray:
        stored = (self.stored[0], self.stored[1])
        return widen_layer(scheme, _module(self.name), stored, source.read)

    def read_quantized(self, source: TensorSource, layer: QuantizedLayer) -> dict[str, np.ndarray]:
        """Return the parameters of a quantised weight, outputs and inputs one axis each.

        Raises:
          CheckpointError: if a tensor has another element type or holds what it cannot.
        """
        scheme = layer.scheme
        assert scheme is not None
        self._check_bias(source, layer)
        if layer.num_experts is not None:
            return _read_experts(source, layer, layer.num_experts)
        parts = read_layer(scheme, layer.module, (self.stored[0], self.stored[1]), source.read)
        if self.stop is None:
            return parts
        axes = scheme.form.axes(("outputs", "inputs"), 1)
        return {
            name: part[_range(axes[name], self.start, self.stop)] for name, part in parts.items()
        }

    def _check_bias(self, source: TensorSource, layer: QuantizedLayer) -> None:
        bias = f"{layer.module}.bias"
        # AutoGPTQ stores biases of zeros where a model has none.
        if layer.layer.bias is None and bias in source.names() and source.read(bias).any():
            raise CheckpointError(
                f"tensor {bias} is not zero, but the model has no such bias; fetch the checkpoint "
                "again, or correct the config."
            )


def _read_experts(
    source: TensorSource, layer: QuantizedLayer, num_experts: int
) -> dict[str, np.ndarray]:
    """Return the parameters of all experts' weights, which are read one after the other."""
    assert layer.scheme is not None
    stacks: dict[str, np.ndarray] = {}
    for expert in range(num_experts):
        parts = read_layer(layer.scheme, layer.expert_module(expert), layer.shape, source.read)
        for name, part in parts.items():
            if expert == 0:
                stacks[name] = empty_array((num_experts, *part.shape), part.dtype)
            stacks[name][expert] = part
    return stacks


def match_tensors(
    config: ModelConfig,
    abstract: nnx.State[Any, Any],
    quantized: Mapping[Any, QuantizedLayer],
    source: TensorSource,
) -> list[TensorPlace]:
    """Return the place of each parameter, in flattening order.

    Args:
      config: shape of the model.
      abstract: its parameters, unquantised.
      quantized: layers that are kept in fewer bits, by the paths of their weights.
      source: what there is.

    Raises:
      CheckpointError: if tensors are missing, unexpected or of another shape; it lists them all.
    """
    rules = {rule.path: rule for rule in ARCHITECTURES[config.architecture].weight_rules}
    order = {path: number for number, path in enumerate(rules)}
    # The parameters of each tensor, in the order of their rules: number, shape, shape stored as.
    tensors: dict[str, list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]] = {}
    layers: dict[str, QuantizedLayer] = {}
    in_heads = set()
    leaves = nnx.to_flat_state(abstract)
    for number, (path, leaf) in enumerate(leaves):
        number_of_layer = next((str(key) for key in path if isinstance(key, int)), "")
        rule = rules[".".join("*" if isinstance(key, int) else str(key) for key in path)]
        name = rule.name.replace("*", number_of_layer)
        stored = _checkpoint_shape(leaf.shape, rule)
        tensors.setdefault(name, []).append((order[rule.path], number, leaf.shape, stored))
        if rule.is_part_of_head:
            in_heads.add(name)
        if path in quantized and quantized[path].scheme is not None:
            layers[name] = quantized[path]
    places: dict[int, TensorPlace] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for name, members in tensors.items():
        whole = (sum(shape[0] for *_, shape in members), *members[0][3][1:])
        start = 0
        for _, number, shape, stored in sorted(members):
            stop = None if len(members) == 1 else start + stored[0]
            is_packed = leaves[number][1].dtype == np.uint8
            place = TensorPlace(name, shape, whole, start, stop, is_packed)
            places[number] = _of_each_head(place, config) if name in in_heads else place
            start += stored[0]
        scheme = places[members[0][1]].scheme
        if scheme is not None:
            expected |= layer_tensors(scheme, _module(name), (whole[0], whole[1]))
        else:
            expected |= _tensors_of(name, whole, layers.get(name))
    _check(config, expected, {f"{layer.module}.bias" for layer in layers.values()}, source)
    return [places[number] for number in range(len(leaves))]


def _of_each_head(place: TensorPlace, config: ModelConfig) -> TensorPlace:
    """Return the place of a part of each head, given that of as many outputs side by side.

    Such parameters are kept in full, so a tensor in fewer bits is widened.
    """
    num_heads, start, stop = place.shape[0], place.start, place.stop
    assert stop is not None, "the head has no other part"
    module = _module(place.name)
    scheme = None if config.quantization is None else config.quantization.scheme(module)
    problem = None if scheme is None else scheme.problem(place.stored[0], place.stored[1])
    if problem is not None:
        raise UnsupportedModelError(
            f"{module} cannot be quantised as the checkpoint's quantization_config says: {problem}."
        )
    start, stop = start // num_heads, stop // num_heads
    return replace(place, start=start, stop=stop, num_heads=num_heads, scheme=scheme)


def _module(name: str) -> str:
    """Return the name of the layer that a tensor of this name is the weight of."""
    return name.removesuffix(".weight")


def _tensors_of(
    name: str, shape: tuple[int, ...], layer: QuantizedLayer | None
) -> dict[str, tuple[int, ...]]:
    if layer is None or layer.scheme is None:
        return {name: shape}
    num_outputs, num_inputs = shape[-2:]
    return layer_tensors(layer.scheme, layer.module, (num_outputs, num_inputs), layer.num_experts)


def _check(
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    optional: set[str],
    source: TensorSource,
) -> None:
    available = set(source.names())
    missing = [name for name in expected if name not in available]
    misshaped = [
        f"{name} {list(actual)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in available and not same_shape(actual := source.shape(name), shape)
    ]
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unexpected = sorted(
        name
        for name in available - expected.keys() - optional - ignored
        if not _is_ignored(name, config)
    )
    _warn_of_ignored(available, config)
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    if any(problems.values()):
        listed = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
        raise CheckpointError(
            f"the checkpoint's tensors do not fit its config ({config.architecture}); "
            f"{'; '.join(listed)}. Fetch the checkpoint again, or correct the config."
        )


def _warn_of_ignored(available: set[str], config: ModelConfig) -> None:
    formats = config.quantization
    names = sorted(n for n in available if formats is not None and formats.ignores_tensor(n))
    if names:
        logger.warning(
            "%d tensors with scales of keys and values, such as %s, are not used: the KV cache "
            "holds keys and values as they are.",
            len(names),
            names[0],
        )


def _is_ignored(name: str, config: ModelConfig) -> bool:
    if (layer := _LAYER.match(name)) is not None:
        further = int(layer[1]) - config.num_layers
        if 0 <= further < config.num_further_layers:
            return True
    if config.quantization is not None and config.quantization.ignores_tensor(name):
        return True
    return bool(_IGNORED.search(name))


def _range(axes: tuple[str | None, ...], start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of a range of outputs; all of a part that has none."""
    return tuple(slice(start, stop) if axis == "outputs" else slice(None) for axis in axes)


def _checkpoint_shape(shape: tuple[int, ...], rule: WeightRule) -> tuple[int, ...]:
    axis = rule.heads_axis
    if axis is None:
        return shape
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
