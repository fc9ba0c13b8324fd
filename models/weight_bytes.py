"""`count_weight_bytes`: what a model's weights take in memory, in any precision."""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model


@dataclasses.dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights of a model, or of one device's part of it, by when a step reads them.

    Attributes:
      layers: of all layers but their experts; every step reads them.
      experts: of all experts; a step reads those that its tokens chose.
      head: of the projection to the vocabulary, tied or not; read if a row is sampled.
      embedding: of the embedding if it is not the head, and the last norm; next to nothing is read.
    """

    layers: int
    experts: int
    head: int
    embedding: int

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.layers + self.experts + self.head + self.embedding


@functools.cache
def count_weight_bytes(model: ModelConfig, *, dtype: str, quantization: str | None) -> WeightBytes:
    """Return what the parameters of `abstract_model` take.

    Layers of one kind are alike, so one of each kind is built, and counted as often as there are
    such. (All of them, if a quantised checkpoint may treat each differently.)

    Args:
      model: of all, or `TensorParallel.part`.
      dtype, quantization: as `abstract_model` takes them.
    """
    built, counts = (model, [1] * model.num_layers)
    if model.quantization is None:
        built, counts = _one_of_each_kind(model)
    _, params = abstract_model(built, dtype=dtype, quantization=quantization)
    found = dict.fromkeys(("layers", "experts", "head", "embedding"), 0)
    for path, leaf in nnx.to_flat_state(params):
        kind = _kind(path, is_tied=model.tie_word_embeddings)
        times = counts[int(str(path[1]))] if path[0] == "layers" else 1
        found[kind] += times * math.prod(leaf.shape) * leaf.dtype.itemsize
    return WeightBytes(**found)


def _one_of_each_kind(model: ModelConfig) -> tuple[ModelConfig, list[int]]:
    """Return a model with a layer of each kind, and how many there are of them."""
    dense = model.num_layers if model.experts is None else len(model.experts.dense_layers)
    counts = [count for count in (dense, model.num_layers - dense) if count]
    experts = model.experts
    if experts is not None:
        experts = dataclasses.replace(experts, dense_layers=(0,) if dense else ())
    built = dataclasses.replace(
        model, num_layers=len(counts), layer_windows=(None,) * len(counts), experts=experts
    )
    return built, counts


def _kind(path: tuple[Any, ...], *, is_tied: bool) -> str:
    if path[0] == "layers":
        return "experts" if "experts" in path else "layers"
    return "head" if path[0] == ("embed" if is_tied else "lm_head") else "embedding"
