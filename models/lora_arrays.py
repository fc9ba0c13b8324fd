"""`LoRAArrays`: the adapters of an engine on its devices, and how one gets there."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.adapter import AdapterMatrices
from paged.models.lora import LoRAPair, LoRAStack
from paged.models.lora_layers import LoRALayer

type Place = Callable[[Sequence[str | None]], jax.sharding.Sharding | None]
"""Logical axes of an array -> where it lies; None: on the one device."""


class LoRAArrays:
    """Holds a `LoRAStack`, zeros at first, and writes adapters into its slots (mutable).

    Writing donates the arrays before: a step that was started with them is run first.

    Args:
      layers: of the model as it is in checkpoints.
      max_loras: slots beside slot 0.
      max_rank: rows of each.
      dtype: element type.
      kv_head_copies: how often each kv head is there (`TensorParallel`).
      place: where arrays lie.

    Attributes:
      stack: what programs take.
    """

    def __init__(
        self,
        layers: Sequence[LoRALayer],
        *,
        max_loras: int,
        max_rank: int,
        dtype: str,
        kv_head_copies: int = 1,
        place: Place = lambda _: None,
    ) -> None:
        self._layers = layers
        self._max_rank = max_rank
        self._dtype = jnp.dtype(dtype)
        self._copies = kv_head_copies
        self._place = place
        rows = max_loras * max_rank
        self.stack = LoRAStack(
            {
                layer.path: LoRAPair(
                    jnp.zeros((rows, *inputs), dtype, device=self._sharding(layer.inputs)),
                    jnp.zeros((rows, *outputs), dtype, device=self._sharding(layer.outputs)),
                )
                for layer in layers
                for inputs, outputs in [self._shapes(layer)]
            },
            max_rank,
        )
        shardings = jax.tree.map(lambda array: array.sharding, self.stack)
        self._write = jax.jit(_write, donate_argnums=0, out_shardings=shardings)
        self._to_device = partial(jax.device_put, device=shardings)

    def load(self, slot: int, adapter: Mapping[str, AdapterMatrices]) -> None:
        """Put an adapter into a slot, 1 or more, by the paths of its layers; steps from now on
        have it."""
        padded = LoRAStack(
            {layer.path: self._padded(layer, adapter.get(layer.path)) for layer in self._layers},
            self._max_rank,
        )
        first_row = np.int32((slot - 1) * self._max_rank)
        self.stack = self._write(self.stack, self._to_device(padded), first_row)

    def _padded(self, layer: LoRALayer, matrices: AdapterMatrices | None) -> Any:
        """Return a layer's matrices with all the rows of a slot."""
        shapes = self._shapes(layer)
        a, b = (np.zeros((self._max_rank, *shape), self._dtype) for shape in shapes)
        if matrices is not None:
            a[: len(matrices.a)] = matrices.a
            b[: len(matrices.b)] = self._repeat(matrices.b, list(layer.outputs))
        return LoRAPair(a, b)  # type: ignore[arg-type]

    def _shapes(self, layer: LoRALayer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        outputs = tuple(
            size * self._copies if axis == "kv_heads" else size
            for axis, size in layer.outputs.items()
        )
        return tuple(layer.inputs.values()), outputs

    def _repeat(self, b: np.ndarray, axes: list[str]) -> np.ndarray:
        if self._copies == 1 or "kv_heads" not in axes:
            return b
        return np.repeat(b, self._copies, axis=1 + axes.index("kv_heads"))

    def _sharding(self, axes: Mapping[str, int]) -> jax.sharding.Sharding:
        # Named, as what is written comes back: or the second call would be compiled anew.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return self._place((None, *axes)) or here


def _write(stack: LoRAStack, adapter: LoRAStack, first_row: jax.Array) -> LoRAStack:
    written: LoRAStack = jax.tree.map(
        lambda array, rows: jax.lax.dynamic_update_slice_in_dim(array, rows, first_row, axis=0),
        stack,
        adapter,
    )
    return written


def lora_bytes(layers: Sequence[LoRALayer], *, max_loras: int, max_rank: int, dtype: str) -> int:
    """Return the bytes that the arrays of these layers take."""
    columns = sum(layer.num_inputs + layer.num_outputs for layer in layers)
    return math.prod((max_loras, max_rank, columns, jnp.dtype(dtype).itemsize))
