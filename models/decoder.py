"""The decoder-only skeleton: attention over the paged cache, SwiGLU, pre-norm residuals.

Families differ from it by configuration (biases, tied head, rotary scaling), not by code. Layers
are unrolled, and each keeps its own cache array, so that a donated cache is updated in place.
"""

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from paged.attention import AttentionPlan, plan_attention, ragged_paged_attention
from paged.attention_call import AttentionCall
from paged.cache_groups import CacheGroup, one_group
from paged.metadata import AttentionMetadata
from paged.models.batch import ForwardBatch
from paged.models.config import ModelConfig
from paged.models.layers import Embed, Linear, RMSNorm, project, project_gated
from paged.models.rope import rope_cos_sin
from paged.rope_write import rotate_and_write_kv


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding over one layer of the paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sliding_window: int | None,
        dtype: str,
        attention_backend: str,
        rngs: nnx.Rngs,
    ) -> None:
        self.sliding_window = sliding_window
        self.attention_backend = attention_backend
        q_axes = {"q_heads": config.num_q_heads, "head_dim": config.head_dim}
        kv_axes = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        embed = {"embed": config.hidden_size}

        def project(equation: str, heads: dict[str, int]) -> Linear:
            bias_axes = tuple(heads) if config.attention_bias else ()
            return Linear(equation, heads | embed, bias_axes=bias_axes, dtype=dtype, rngs=rngs)

        self.q_proj = project("TD,NHD->TNH", q_axes)
        self.k_proj = project("TD,KHD->TKH", kv_axes)
        self.v_proj = project("TD,KHD->TKH", kv_axes)
        self.o_proj = Linear(
            "TNH,DNH->TD",
            embed | q_axes,
            bias_axes=("embed",) if config.attention_output_bias else (),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        norm: RMSNorm,
        kv_cache: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
        cos_sin: tuple[Array, Array],
        metadata: AttentionMetadata,
        plan: AttentionPlan,
    ) -> tuple[
        Float[Array, "num_tokens hidden"],
        Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    ]:
        """Return x plus the attention over `norm(x)`, and the cache with this step's keys."""
        num_rows = metadata.num_rows
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj, norm=norm, num_rows=num_rows)
        backend = self.attention_backend
        q, kv_cache = rotate_and_write_kv(
            q, k, v, kv_cache, *cos_sin, metadata.slot_mapping, backend=backend
        )
        mixed = ragged_paged_attention(
            q,
            kv_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            sliding_window=self.sliding_window,
            backend=backend,
            plan=plan,
        )
        return self.o_proj(mixed, residual=x, num_rows=num_rows), kv_cache


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`. Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, *, dtype: str, rngs: nnx.Rngs) -> None:
        mlp, embed = {"mlp": config.intermediate_size}, {"embed": config.hidden_size}

        def project(equation: str, out: dict[str, int], into: dict[str, int]) -> Linear:
            bias_axes = tuple(out) if config.mlp_bias else ()
            return Linear(equation, out | into, bias_axes=bias_axes, dtype=dtype, rngs=rngs)

        self.gate_proj = project("TD,FD->TF", mlp, embed)
        self.up_proj = project("TD,FD->TF", mlp, embed)
        self.down_proj = project("TF,DF->TD", embed, mlp)

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], norm: RMSNorm, num_rows: Int[Array, "1"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return x plus the MLP of `norm(x)`; rows from `num_rows` on are padding."""
        mixed = project_gated(
            x, self.gate_proj, self.up_proj, activation="silu", norm=norm, num_rows=num_rows
        )
        return self.down_proj(mixed, residual=x, num_rows=num_rows)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sliding_window: int | None,
        dtype: str,
        attention_backend: str,
        rngs: nnx.Rngs,
    ) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype)
        self.attention = Attention(
            config,
            sliding_window=sliding_window,
            dtype=dtype,
            attention_backend=attention_backend,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        kv_cache: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
        cos_sin: tuple[Array, Array],
        metadata: AttentionMetadata,
        plan: AttentionPlan,
    ) -> tuple[
        Float[Array, "num_tokens hidden"],
        Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    ]:
        """Return the residual stream after this layer, and the layer's updated cache."""
        x, kv_cache = self.attention(x, self.attention_norm, kv_cache, cos_sin, metadata, plan)
        return self.mlp(x, self.mlp_norm, metadata.num_rows), kv_cache


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
        size, vocab_size = config.hidden_size, config.vocab_size
        self.embed = Embed(vocab_size, size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            DecoderLayer(
                config,
                sliding_window=window,
                dtype=dtype,
                attention_backend=attention_backend,
                rngs=rngs,
            )
            for window in config.layer_windows
        )
        self.norm = RMSNorm(size, epsilon=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embed(vocab_size, size, dtype=dtype, rngs=rngs)

    def __call__(
        self, batch: ForwardBatch, kv_layers: tuple[Array, ...]
    ) -> tuple[Float[Array, "num_tokens hidden"], tuple[Array, ...]]:
        """Return the hidden states after the final norm, and the updated cache arrays."""
        cos_sin = rope_cos_sin(batch.positions, self.config.rope, self.config.head_dim)
        x = self.embed(batch.token_ids)
        plans: dict[tuple[int, int | None], AttentionPlan] = {}
        arrays = list(kv_layers)
        for layer, place in zip(self.layers, self.cache_places, strict=True):
            metadata = batch.attention[place.group]
            window = layer.attention.sliding_window
            plan = plans.get((place.group, window))
            if plan is None:
                plan = self._plan_attention(metadata, x, arrays[0], window)
                plans[place.group, window] = plan
            x, arrays[place.array] = _apply_layer(
                layer, x, arrays[place.array], cos_sin, metadata, plan
            )
        return self.norm(x), tuple(arrays)

    def _plan_attention(
        self, metadata: AttentionMetadata, x: Array, kv_cache: Array, window: int | None
    ) -> AttentionPlan:
        """Return what layers of one cache group and one window share."""
        call = AttentionCall(
            num_tokens=x.shape[0],
            num_q_heads=self.config.num_q_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=kv_cache.shape[3],
            q_dtype=str(x.dtype),
            kv_cache_dtype=str(kv_cache.dtype),
            sliding_window=window,
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


@jax.jit
def _apply_layer(
    layer: DecoderLayer,
    x: Array,
    kv_cache: Array,
    cos_sin: tuple[Array, Array],
    metadata: AttentionMetadata,
    plan: AttentionPlan,
) -> tuple[Array, Array]:
    # Jitted for its cache alone: a layer is a pytree, and layers of one shape share a trace, so a
    # model of 30 layers is traced once. XLA inlines the calls again.
    return layer(x, kv_cache, cos_sin, metadata, plan)
