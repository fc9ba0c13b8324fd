"""`LoRAStack`: the adapters on the device, and what they add to a linear layer's product.

All adapters of a layer lie in two arrays, side by side, so that a batch of tokens of any adapters
takes two products: with every A, of which a mask keeps what is of a token's own adapter, and with
every B (docs/decisions/0047). Knows nothing of files or of which layers a model has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The matrices of one linear layer, of all adapters that are on the device.

    Attributes:
      a: `[max_loras * max_rank, *input axes]`; an adapter of a smaller rank has rows of zeros.
      b: `[max_loras * max_rank, *output axes]`, times the adapter's factor.
    """

    a: Array
    b: Array


@partial(jax.tree_util.register_dataclass, data_fields=("layers",), meta_fields=("max_rank",))
@dataclass(frozen=True, slots=True)
class LoRAStack:
    """Adapters by slot. Slot 0 is the zero adapter, of the base model, and takes no memory.

    Attributes:
      layers: by the path of the layer in the model, dotted.
      max_rank: rows of each adapter; slot i has those from `(i - 1) * max_rank` on.
    """

    layers: Mapping[str, LoRAPair]
    max_rank: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """What the adapters of a batch's tokens add to one layer's product.

    Attributes:
      pair: the layer's matrices.
      is_own: bool `[num_tokens, max_loras * max_rank]`, see `own_rows`.
    """

    pair: LoRAPair
    is_own: Array

    def add(
        self, x: Float[Array, "num_tokens ..."], y: Float[Array, "num_tokens ..."]
    ) -> Float[Array, "num_tokens ..."]:
        """Return `y + B(A(x))`, each row by its own adapter, in y's dtype.

        Args:
          x: the layer's input, or the part of it that is here: parts are summed like y's own.
          y: the layer's product, before sums over devices or after, without matter.
        """
        a, b = (matrix.reshape(matrix.shape[0], -1) for matrix in (self.pair.a, self.pair.b))
        rows = x.reshape(x.shape[0], -1).astype(a.dtype)
        inner = jnp.einsum("TD,RD->TR", rows, a, preferred_element_type=jnp.float32)
        # Not times 0: what is of other adapters, or of padding, need not be finite.
        inner = jnp.where(self.is_own, inner, 0).astype(b.dtype)
        delta = jnp.einsum("TR,RF->TF", inner, b, preferred_element_type=jnp.float32)
        return (y.astype(jnp.float32) + delta.reshape(y.shape)).astype(y.dtype)


def own_rows(stack: LoRAStack, lora_ids: Int[Array, "num_tokens"]) -> Array:
    """Return which rows of the matrices are of each token's adapter, given its slot.

    Returns: bool `[num_tokens, max_loras * max_rank]`; of slot 0 none.
    """
    num_rows = next(iter(stack.layers.values())).a.shape[0]
    slots = 1 + jnp.arange(num_rows, dtype=jnp.int32) // stack.max_rank
    return lora_ids[:, None] == slots[None]
