"""`pack_linear_layers`: the weights of a loaded model in the layout of the native CPU kernels."""

import concurrent.futures
import functools
import math
import os
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from paged.backends import release_freed_memory
from paged.models.forward import GraphDef, linear_layers
from paged.models.layers import Embed, Linear
from paged.models.moe import ExpertLinear
from paged.models.stored_weight import can_pack, matrix_to_pack, values_of
from paged.native.expert_linear import pack_experts, packed_experts_shape
from paged.native.huge_pages import allocate
from paged.native.linear import pack, packed_shape

# Of each weight in the memory that all share: a cache line, and what JAX needs to use it in place.
_ALIGNMENT = 64


def pack_linear_layers(
    graphdef: GraphDef,
    params: nnx.State[Any, Any],
    *,
    keep: bool = False,
    progress: bool = True,
) -> nnx.State[Any, Any]:
    """Return the parameters with packed linear layers and head.

    A table that is both embedding and head is kept packed only, and looked up there. Weights in a
    form that the kernels do not have stay as they are.

    Args:
      graphdef, params: the split model, on the CPU.
      keep: leave `params` as they are. Otherwise each weight is deleted once it is packed: they
        cannot be used any more, and no more memory is taken.
      progress: show a bar on standard error.

    Raises:
      ValueError: for an element type that the kernels do not have.
    """
    model = nnx.merge(graphdef, params)
    layers = [layer for layer in linear_layers(model) if _can_pack(layer)]
    places = _allocate(layers)
    with (
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(
            total=sum(place.nbytes for place in places),
            desc="Packing weights",
            unit="B",
            unit_scale=True,
            disable=not progress,
        ) as bar,
    ):
        pack_one = functools.partial(_pack, keep=keep)
        for layer, packed in zip(layers, pool.map(pack_one, layers, places), strict=True):
            # The names of its axes stay, unused: packed weights live on one device.
            values_of(layer.weight).set_value(packed)
            bar.update(packed.nbytes)
    packed_params: nnx.State[Any, Any] = nnx.state(model)
    return packed_params


def _can_pack(layer: Linear | ExpertLinear | Embed) -> bool:
    return layer.can_pack if isinstance(layer, ExpertLinear) else can_pack(layer.weight)


def _allocate(layers: list[Linear | ExpertLinear | Embed]) -> list[np.ndarray]:
    """Return memory for each layer's packed weight, one after the other in large pages."""
    shapes, starts, end = [], [], 0
    for layer in layers:
        values = values_of(layer.weight)[...]
        shapes.append(_packed_shape(layer, values))
        starts.append(end)
        num_bytes = math.prod(shapes[-1]) * values.dtype.itemsize
        end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    memory = allocate(end)
    places = []
    for layer, shape, start in zip(layers, shapes, starts, strict=True):
        dtype = values_of(layer.weight)[...].dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        places.append(memory[start : start + num_bytes].view(dtype).reshape(shape))
    return places


def _packed_shape(layer: Linear | ExpertLinear | Embed, values: jax.Array) -> tuple[int, ...]:
    if isinstance(layer, ExpertLinear):
        num_experts, num_outputs = layer.output_shape
        return packed_experts_shape((num_experts, num_outputs, values.shape[-1]), values.dtype)
    num_outputs = math.prod(layer.output_shape)
    return packed_shape(num_outputs, values.size // num_outputs, values.dtype)


def _pack(layer: Linear | ExpertLinear | Embed, place: np.ndarray, *, keep: bool) -> jax.Array:
    weight = values_of(layer.weight)[...]
    matrix = matrix_to_pack(layer.weight, math.prod(layer.output_shape))
    if isinstance(layer, ExpertLinear):
        pack_experts(matrix.reshape(*layer.output_shape, -1), place)
    else:
        pack(matrix, place)
    del matrix
    # JAX uses memory that is aligned as it is, and keeps it as long as the array lives.
    packed: jax.Array = jax.device_put(place, next(iter(weight.devices())))
    if not keep:
        weight.delete()
        release_freed_memory()
    return packed
