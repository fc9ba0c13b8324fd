"""`pack_linear_layers`: the weights of a loaded model in the layout of the native CPU kernels."""

import concurrent.futures
import math
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tqdm import tqdm

from paged.models.forward import GraphDef, linear_layers
from paged.models.layers import Embed, Linear
from paged.models.stored_weight import values_of
from paged.native.linear import pack


def pack_linear_layers(
    graphdef: GraphDef, params: nnx.State[Any, Any], *, progress: bool = True
) -> nnx.State[Any, Any]:
    """Return the parameters with packed linear layers and head; they take no more memory.

    A table that is both embedding and head is kept packed only, and looked up there.

    Args:
      graphdef, params: the split model, on the CPU; each weight is deleted once it is packed, so
        `params` cannot be used any more.
      progress: show a bar on standard error.

    Raises:
      ValueError: for an element type that the kernels do not have.
    """
    model = nnx.merge(graphdef, params)
    layers = linear_layers(model)
    total = sum(values_of(layer.weight)[...].nbytes for layer in layers)
    with (
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(
            total=total, desc="Packing weights", unit="B", unit_scale=True, disable=not progress
        ) as bar,
    ):
        for layer, packed in zip(layers, pool.map(_pack, layers), strict=True):
            # The names of its axes stay, unused: packed weights live on one device.
            values_of(layer.weight).set_value(packed)
            bar.update(packed.nbytes)
    packed_params: nnx.State[Any, Any] = nnx.state(model)
    return packed_params


def _pack(layer: Linear | Embed) -> Array:
    weight = values_of(layer.weight)[...]
    matrix = np.asarray(weight).reshape(math.prod(layer.output_shape), -1)
    packed = jnp.asarray(pack(matrix))
    weight.delete()
    return packed
