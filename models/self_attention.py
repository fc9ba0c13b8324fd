"""`Attention`: grouped-query attention over what its context holds, such as a paged cache.

`make_attention` decides whether a layer has this kind, or `LatentAttention`.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from paged.models.attention_context import AttentionContext, AttentionOptions
from paged.models.branch import Branch
from paged.models.config import ModelConfig
from paged.models.latent_attention import LatentAttention
from paged.models.layers import Linear, RMSNorm, project
from paged.models.parameters import parameter


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding."""

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
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap
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
        self.q_norm = _head_norm(config, q_axes, dtype)
        self.k_norm = _head_norm(config, kv_axes, dtype)
        sinks = jnp.zeros(config.num_q_heads, dtype)
        self.sinks = parameter(sinks, ("q_heads",)) if config.attention_sinks else None

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        branch: Branch,
        cos_sin: tuple[Array, Array],
        context: AttentionContext,
    ) -> tuple[Float[Array, "num_tokens hidden"], Array | None]:
        """Return the stream x after this branch, and the context's updated cache, if it has one."""
        num_rows = context.num_rows
        rows, norm = branch.enter(x)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = project(rows, *projections, norm=norm, num_rows=num_rows)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        options = AttentionOptions(
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            backend=self.attention_backend,
        )
        mixed, kv_cache = context.attend(q, k, v, cos_sin, options)
        return branch.project_and_join(x, mixed, self.o_proj, num_rows), kv_cache


def make_attention(
    config: ModelConfig, layer: int, *, dtype: str, attention_backend: str, rngs: nnx.Rngs
) -> Attention | LatentAttention:
    """Return the attention of a layer: what kind it is, the config says.

    Args:
      config: shape of the model.
      layer: its number.
      dtype: element type of the parameters.
      attention_backend: name that the cache ops are called with.
      rngs: source of the initial values.
    """
    if config.latent is not None:
        return LatentAttention(config, dtype=dtype, attention_backend=attention_backend, rngs=rngs)
    return Attention(
        config,
        sliding_window=config.layer_windows[layer],
        dtype=dtype,
        attention_backend=attention_backend,
        rngs=rngs,
    )


def _head_norm(config: ModelConfig, axes: dict[str, int], dtype: str) -> RMSNorm | None:
    """Return the norm of queries or keys, which have these axes, if the model has one."""
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "head":
        axes = {"head_dim": axes["head_dim"]}
    return RMSNorm(axes, epsilon=config.rms_norm_eps, dtype=dtype, adds_one=config.norm_adds_one)
