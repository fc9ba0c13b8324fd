"""`AttentionContext`: what a layer attends to: a paged cache, or the batch itself."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from paged.attention import AttentionPlan, ragged_paged_attention
from paged.dense_attention import dense_attention
from paged.metadata import AttentionMetadata
from paged.rope_write import rotate, rotate_and_write_kv


class AttentionOptions(NamedTuple):
    """What a layer says about its attention; see `ragged_paged_attention`."""

    scale: float | None
    sliding_window: int | None
    soft_cap: float | None
    sinks: Array | None
    backend: str


@runtime_checkable
class AttentionContext(Protocol):
    """Where a layer's keys and values are; a pytree."""

    @property
    def num_rows(self) -> Array:
        """Token rows that are not padding, int32 `[1]`."""

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        cos_sin: tuple[Array, Array],
        options: AttentionOptions,
    ) -> tuple[Array, Array | None]:
        """Rotate queries and keys, and attend.

        Args:
          q, k, v: `[num_tokens, num_heads, head_dim]`, before the rotary embedding. Without v the
            rotated keys are the values, and a cache has one plane.
          cos_sin: its angles, see `rotate`.
          options: of the layer.

        Returns: what is attended to, shaped like q, and the updated cache, if there is one.
        """


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PagedContext:
    """One layer's array of the paged cache, and where the batch's tokens are in it.

    Attributes:
      kv_cache: `[num_blocks, planes, num_kv_heads, block_size, head_dim]`.
      metadata: of the layer's cache group.
      plan: of `metadata`, see `plan_attention`.
    """

    kv_cache: Array
    metadata: AttentionMetadata
    plan: AttentionPlan

    @property
    def num_rows(self) -> Array:
        """See `AttentionContext.num_rows`."""
        return self.metadata.num_rows

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        cos_sin: tuple[Array, Array],
        options: AttentionOptions,
    ) -> tuple[Array, Array]:
        """Write keys and values to the cache, and attend to it."""
        metadata = self.metadata
        q, kv_cache = rotate_and_write_kv(
            q, k, v, self.kv_cache, *cos_sin, metadata.slot_mapping, backend=options.backend
        )
        mixed = ragged_paged_attention(
            q,
            kv_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=options.sinks,
            backend=options.backend,
            plan=self.plan,
        )
        return mixed, kv_cache


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("num_seqs", "length"))
@dataclass(frozen=True, slots=True)
class DenseContext:
    """The batch itself: whole sequences of one length, one after the other; no cache.

    Attributes:
      num_seqs: how many.
      length: tokens of each.
    """

    num_seqs: int
    length: int

    @property
    def num_rows(self) -> Array:
        """See `AttentionContext.num_rows`: no row is padding."""
        return jnp.full(1, self.num_seqs * self.length, jnp.int32)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        cos_sin: tuple[Array, Array],
        options: AttentionOptions,
    ) -> tuple[Array, None]:
        """Attend within each sequence; a gradient flows back."""
        shape = (self.num_seqs, self.length)
        keys = rotate(k, *cos_sin)
        values = keys if v is None else v
        mixed = dense_attention(
            rotate(q, *cos_sin).reshape(*shape, *q.shape[1:]),
            keys.reshape(*shape, *k.shape[1:]),
            values.reshape(*shape, *k.shape[1:]),
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=options.sinks,
        )
        return mixed.reshape(q.shape), None
