"""The paged KV cache: its layout, its arrays and its byte arithmetic.

One layout serves every backend: per layer `[num_blocks, planes, num_kv_heads, block_size,
head_dim]`, keys in plane 0 and values in plane 1, so one head's block is contiguous and a whole
block can be moved or shared as one slice (docs/decisions/0003). A cache of one plane holds vectors
that are keys and values at once, as latent attention has them (docs/decisions/0050). Block 0 is the
null block: no request ever owns it, padding writes to it, and nothing reads what it holds.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, Sharding

from paged.sharding import replicated

NULL_BLOCK = 0
"""Id of the block that no request owns; padding tokens are written there."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one block holds; every size in bytes about KV memory is computed here.

    Attributes:
      num_layers: layers that keep keys and values, or, in a model with several cache groups, those
        of one group (`layers_per_group`).
      num_kv_heads: kv heads per layer on all devices together.
      head_dim: features of one head.
      block_size: tokens per block.
      dtype: element type, a NumPy or ml_dtypes name such as "bfloat16".
      num_planes: 2: keys, and values; 1: what is attended to is its own value.

    Source: PagedAttention, arXiv:2309.06180.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    num_planes: int = 2

    def __post_init__(self) -> None:
        if self.num_planes not in (1, 2):
            raise ValueError(f"num_planes={self.num_planes} must be 1 or 2.")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        item_bytes = int(jnp.dtype(self.dtype).itemsize)
        elements = self.num_planes * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * item_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * self.bytes_per_token

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request occupy."""
        return -(-num_tokens // self.block_size)

    def blocks_that_fit(self, available_bytes: int) -> int:
        """Blocks, the null block included, that fit into `available_bytes`."""
        return max(0, available_bytes // self.bytes_per_block)

    def waste_bytes(self, num_tokens: int) -> int:
        """Bytes allocated but unused by a request of `num_tokens`: the rest of its last block."""
        unused_slots = self.blocks_for(num_tokens) * self.block_size - num_tokens
        return unused_slots * self.bytes_per_token

    def layer_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of a layer's array, `[num_blocks, planes, num_kv_heads, block_size, head_dim]`."""
        return (num_blocks, self.num_planes, self.num_kv_heads, self.block_size, self.head_dim)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """The device arrays of the cache; a pytree that a donated jit updates in place.

    Attributes:
      layers: one array per layer of a cache group, each
        `[num_blocks, planes, num_kv_heads, block_size, head_dim]`.
      token_ids: the token whose keys and values a slot holds, `[num_blocks, block_size]` int32.
        Sampling penalties read the tokens of a request from here through its block table, so
        no history ever travels from the host (docs/decisions/0011).
    """

    layers: tuple[Array, ...]
    token_ids: Array

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return int(self.token_ids.shape[0])

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.token_ids.shape[1])


def allocate_kv_cache(
    spec: KVCacheSpec, num_blocks: int, sharding: NamedSharding | None = None
) -> KVCache:
    """Return a zeroed cache of `num_blocks` blocks.

    Zeros, not uninitialised memory: masked slots are multiplied by weight zero in some backends,
    and zero times an uninitialised NaN is NaN.

    Args:
      spec: what a block holds.
      num_blocks: blocks in the pool, the null block included; at least 2.
      sharding: placement of each layer's array, on a mesh; every device of it holds all token
        ids. None: the default device, where they stay, as `paged.models.load` puts parameters:
        arrays that JAX may still move have another type than what a jitted step returns, and its
        second call would be compiled anew.

    Raises:
      ValueError: if fewer than two blocks are asked for.
    """
    if num_blocks < 2:
        raise ValueError(
            f"num_blocks={num_blocks} must be at least 2: block {NULL_BLOCK} is the null block."
        )
    shape = spec.layer_shape(num_blocks)
    here = _default_device() if sharding is None else sharding
    everywhere = here if sharding is None else replicated(sharding.mesh)
    layers = tuple(jnp.zeros(shape, spec.dtype, device=here) for _ in range(spec.num_layers))
    return KVCache(layers, jnp.zeros((num_blocks, spec.block_size), jnp.int32, device=everywhere))


def _default_device() -> Sharding | None:
    """Where JAX puts arrays now; None while it traces, as what is traced is put nowhere."""
    somewhere = jnp.zeros(())
    return None if isinstance(somewhere, jax.core.Tracer) else somewhere.sharding
