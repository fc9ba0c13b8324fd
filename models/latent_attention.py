"""`LatentAttention`: multi-head latent attention, over a cache of one vector per token.

A head's key is a product of a latent vector c with the head's matrix, and so is its value. What the
head does can be done to c itself: q . (K c) = (K^T q) . c, and sum(w V c) = V sum(w c). So queries
are brought to the latent space, all heads attend to the same vectors, as if there were one kv head
whose keys are its values, and their outputs are brought back ("absorbed" form). The part of a key
that has a position is shared by all heads, too: it lies before c in the same vector, where the
rotary embedding of the cache writes it.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C; docs/decisions/0050.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from paged.models.attention_context import AttentionContext, AttentionOptions
from paged.models.branch import Branch
from paged.models.config import ModelConfig
from paged.models.layers import Linear, RMSNorm, project
from paged.models.parameters import random_weight

# Of the norms of latent vectors: what the published code has, whatever the config says of others.
_EPSILON = 1e-6


class LatentAttention(nnx.Module):
    """Attention of many query heads to one vector per token."""

    def __init__(
        self, config: ModelConfig, *, dtype: str, attention_backend: str, rngs: nnx.Rngs
    ) -> None:
        latent = config.latent
        assert latent is not None, config
        self.latent = latent
        self.sliding_window: int | None = None
        self.scale = config.attention_scale
        self.attention_backend = attention_backend
        heads, embed = {"q_heads": config.num_q_heads}, {"embed": config.hidden_size}
        kv_rank, q_rank = {"latent": latent.kv_rank}, {"latent": latent.q_rank or 0}

        def project_down(size: int) -> Linear:
            bias_axes = ("latent",) if config.attention_bias else ()
            axes = {"latent": size} | embed
            return Linear("TD,RD->TR", axes, bias_axes=bias_axes, dtype=dtype, rngs=rngs)

        def norm(axes: dict[str, int]) -> RMSNorm:
            return RMSNorm(axes, epsilon=_EPSILON, dtype=dtype)

        def project_up(source: dict[str, int]) -> Linear:
            axes = heads | {"head_dim": latent.qk_dim} | source
            return Linear("TD,NHD->TNH", axes, dtype=dtype, rngs=rngs)

        has_q_rank = latent.q_rank is not None
        self.q_proj = None if has_q_rank else project_up(embed)
        self.q_down_proj = project_down(q_rank["latent"]) if has_q_rank else None
        self.q_norm = norm(q_rank) if has_q_rank else None
        self.q_up_proj = project_up(q_rank) if has_q_rank else None
        self.kv_down_proj = project_down(latent.head_dim)
        self.kv_norm = norm(kv_rank)
        # Not `Linear`: queries and outputs of each head have a matrix of their own.
        self.k_up = random_weight(
            heads | {"head_dim": latent.nope_dim} | kv_rank, dtype=dtype, rngs=rngs
        )
        self.v_up = random_weight(
            heads | {"head_dim": latent.value_dim} | kv_rank, dtype=dtype, rngs=rngs
        )
        self.o_proj = Linear(
            "TNH,DNH->TD",
            embed | heads | {"head_dim": latent.value_dim},
            bias_axes=("embed",) if config.attention_output_bias else (),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        branch: Branch,
        cos_sin: tuple[Array, Array],
        context: AttentionContext,
    ) -> tuple[Float[Array, "num_tokens hidden"], Array | None]:
        """Return the stream x after this branch, and the context's updated cache, if it has one."""
        num_rows, latent = context.num_rows, self.latent
        first = self.q_proj or self.q_down_proj
        assert first is not None
        rows, norm = branch.enter(x)
        q, kv = project(rows, first, self.kv_down_proj, norm=norm, num_rows=num_rows)
        if self.q_up_proj is not None:
            (q,) = project(q, self.q_up_proj, norm=self.q_norm, num_rows=num_rows)
        absorbed = jnp.einsum("TNH,NHR->TNR", q[..., : latent.nope_dim], self.k_up[...])
        queries = jnp.concatenate([self._in_halves(q[..., latent.nope_dim :]), absorbed], axis=-1)
        shared = self._in_halves(kv[:, latent.kv_rank :])
        keys = jnp.concatenate([shared, self.kv_norm(kv[:, : latent.kv_rank])], axis=-1)
        options = AttentionOptions(
            scale=self.scale,
            sliding_window=None,
            soft_cap=None,
            sinks=None,
            backend=self.attention_backend,
        )
        mixed, kv_cache = context.attend(queries, keys[:, None], None, cos_sin, options)
        values = jnp.einsum("TNR,NHR->TNH", mixed[..., latent.rope_dim :], self.v_up[...])
        return branch.project_and_join(x, values, self.o_proj, num_rows), kv_cache

    def _in_halves(self, x: Float[Array, "... rope_dim"]) -> Float[Array, "... rope_dim"]:
        """Return rotated features with the first of all pairs before the second ones.

        Of activations and not of weights: these may be quantised, and packed along their outputs.
        """
        if not self.latent.is_interleaved:
            return x
        return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
