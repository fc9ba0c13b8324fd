"""The decoder-only skeleton: attention and MLPs on a float32 residual stream.

Families differ from it by configuration (where norms are, soft caps, windows, rotary embeddings),
not by code. Layers are unrolled, and each keeps its own cache array, so that a donated cache is
updated in place. What a layer attends to, a paged cache or whole sequences, is its context's
business (`paged.models.attention_context`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paged.attention import AttentionPlan, plan_attention
from paged.attention_call import AttentionCall
from paged.cache_groups import CacheGroup, one_group
from paged.metadata import AttentionMetadata
from paged.models.attention_context import AttentionContext, DenseContext, PagedContext
from paged.models.batch import ForwardBatch
from paged.models.branch import Branch
from paged.models.config import ModelConfig
from paged.models.layers import Embed, RMSNorm
from paged.models.mlp import make_mlp
from paged.models.rope import rope_cos_sin
from paged.models.self_attention import make_attention


class DecoderLayer(nnx.Module):
    """Attention and MLP, branches of the residual stream with the norms that the family has."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: str,
        attention_backend: str,
        rngs: nnx.Rngs,
    ) -> None:
        def norm(places: tuple[str, ...]) -> RMSNorm | None:
            return make_norm(config, dtype) if config.norms in places else None

        self.dtype = dtype
        self.multiplier = config.residual_multiplier
        self.attention_norm = norm(("before", "around"))
        self.attention = make_attention(
            config, layer, dtype=dtype, attention_backend=attention_backend, rngs=rngs
        )
        self.attention_post_norm = norm(("after", "around"))
        self.mlp_norm = norm(("before", "around"))
        self.mlp = make_mlp(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm(("after", "around"))

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        cos_sin: tuple[Array, Array],
        context: AttentionContext,
    ) -> tuple[Float[Array, "num_tokens hidden"], Array | None]:
        """Return the float32 residual stream after this layer, and the context's updated cache."""
        branch = Branch(self.dtype, self.attention_norm, self.attention_post_norm, self.multiplier)
        x, kv_cache = self.attention(x, branch, cos_sin, context)
        branch = Branch(self.dtype, self.mlp_norm, self.mlp_post_norm, self.multiplier)
        return self.mlp(x, branch, context.num_rows), kv_cache


def make_norm(config: ModelConfig, dtype: str) -> RMSNorm:
    """Return a norm of the residual stream."""
    return RMSNorm(
        {"embed": config.hidden_size},
        epsilon=config.rms_norm_eps,
        dtype=dtype,
        adds_one=config.norm_adds_one,
    )


class _CachePlace(NamedTuple):
    """Where a layer's keys and values lie: its cache group, and its array of the cache."""

    group: int
    array: int


class DecoderLM(nnx.Module):
    """Embedding, decoder layers, final norm and head.

    Args:
      config: shape of the model.
      dtype: element type of parameters and activations.
      attention_backend: name that the cache ops are called with.
      cache_groups: which layers share block tables; None: all of them.
      rngs: source of the initial parameters; checkpoints replace them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        attention_backend: str,
        cache_groups: tuple[CacheGroup, ...] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.attention_backend = attention_backend
        places = {
            layer: _CachePlace(group, array)
            for group, members in enumerate(cache_groups or one_group(config.num_layers))
            for array, layer in enumerate(members.layers)
        }
        self.cache_places = tuple(places[layer] for layer in range(config.num_layers))
        tied = config.tie_word_embeddings
        self.embed = _table(config, dtype=dtype, is_head=tied, rngs=rngs)
        self.layers = nnx.List(
            DecoderLayer(config, layer, dtype=dtype, attention_backend=attention_backend, rngs=rngs)
            for layer in range(config.num_layers)
        )
        self.norm = make_norm(config, dtype)
        self.lm_head = None if tied else _table(config, dtype=dtype, is_head=True, rngs=rngs)

    def __call__(
        self, batch: ForwardBatch, kv_layers: tuple[Array, ...]
    ) -> tuple[Float[Array, "num_tokens hidden"], tuple[Array, ...]]:
        """Return the hidden states after the final norm, and the updated cache arrays."""
        cos_sin = self._angles(batch.positions)
        vectors = self.embed(batch.token_ids)
        x = vectors.astype(jnp.float32)
        plans: dict[tuple[int, int | None], AttentionPlan] = {}
        arrays = list(kv_layers)
        for layer, angles, place in zip(self.layers, cos_sin, self.cache_places, strict=True):
            metadata = batch.attention[place.group]
            window = layer.attention.sliding_window
            plan = plans.get((place.group, window))
            if plan is None:
                plan = self._plan_attention(metadata, vectors, arrays[0], window)
                plans[place.group, window] = plan
            context = PagedContext(arrays[place.array], metadata, plan)
            x, updated = _apply_layer(layer, x, angles, context)
            assert updated is not None
            arrays[place.array] = updated
        return self.norm(x), tuple(arrays)

    def dense(
        self, token_ids: Int[Array, "num_seqs length"], *, remat: bool = False
    ) -> Float[Array, "num_seqs length hidden"]:
        """Return the hidden states of whole sequences after the final norm; no cache is used.

        Args:
          token_ids: int32 `[num_seqs, length]`, each from position 0 on.
          remat: keep only each layer's input for a gradient, and compute the rest again.
        """
        num_seqs, length = token_ids.shape
        cos_sin = self._angles(jnp.tile(jnp.arange(length, dtype=jnp.int32), num_seqs))
        context = DenseContext(num_seqs, length)
        apply = jax.checkpoint(_apply_layer) if remat else _apply_layer
        x = self.embed(token_ids.reshape(-1)).astype(jnp.float32)
        for layer, angles in zip(self.layers, cos_sin, strict=True):
            x, _ = apply(layer, x, angles, context)
        return self.norm(x).reshape(num_seqs, length, -1)

    def _angles(self, positions: Array) -> list[tuple[Array, Array]]:
        """Return the rotary embedding's angles by layer; layers share what is equal."""
        ropes = [self.config.layer_rope(layer) for layer in range(self.config.num_layers)]
        angles = {
            rope: rope_cos_sin(positions, rope, self.config.rope_dim)
            for rope in dict.fromkeys(ropes)
        }
        return [angles[rope] for rope in ropes]

    def _plan_attention(
        self, metadata: AttentionMetadata, vectors: Array, kv_cache: Array, window: int | None
    ) -> AttentionPlan:
        """Return what layers of one cache group and one window share."""
        call = AttentionCall(
            num_tokens=vectors.shape[0],
            num_q_heads=self.config.num_q_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=kv_cache.shape[3],
            q_dtype=str(vectors.dtype),
            kv_cache_dtype=str(kv_cache.dtype),
            sliding_window=window,
            soft_cap=self.config.attention_soft_cap,
            has_sinks=self.config.attention_sinks,
            num_planes=self.config.kv_planes,
        )
        return plan_attention(
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            call,
            backend=self.attention_backend,
        )

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab_size"]:
        """Return float32 logits of rows of the final hidden states."""
        return self.head.logits(hidden)

    @property
    def head(self) -> Embed:
        """The table that gives the logits: the input embedding if they are tied."""
        return self.embed if self.lm_head is None else self.lm_head


def _table(config: ModelConfig, *, dtype: str, is_head: bool, rngs: nnx.Rngs) -> Embed:
    """Return the embedding, or the head, or, if they are tied, what is both."""
    return Embed(
        config.vocab_size,
        config.hidden_size,
        dtype=dtype,
        rngs=rngs,
        multiplier=config.embedding_multiplier,
        logit_divisor=config.logit_divisor if is_head else 1.0,
        logit_soft_cap=config.logit_soft_cap if is_head else None,
    )


@jax.jit
def _apply_layer(
    layer: DecoderLayer, x: Array, cos_sin: tuple[Array, Array], context: AttentionContext
) -> tuple[Array, Array | None]:
    # Jitted for its cache alone: a layer is a pytree, and layers of one shape share a trace, so a
    # model of 30 layers is traced once. XLA inlines the calls again.
    return layer(x, cos_sin, context)
