"""`AttentionCall`: what is static about a call of the attention op, for backends to look at."""

from dataclasses import dataclass

from jax import Array


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The static side of one `ragged_paged_attention`.

    Attributes:
      num_tokens: rows of the queries.
      num_q_heads, num_kv_heads, head_dim: shape of the heads.
      block_size: tokens per block of the cache.
      q_dtype, kv_cache_dtype: element types, by name.
      sliding_window, soft_cap: as in the op.
      has_kv_scales, has_sinks: whether the op is given them.
      num_planes: of the cache: 2, or 1 if its keys are its values.
    """

    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    q_dtype: str
    kv_cache_dtype: str
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_kv_scales: bool = False
    has_sinks: bool = False
    num_planes: int = 2

    @classmethod
    def of(
        cls,
        q: Array,
        kv_cache: Array,
        *,
        sliding_window: int | None,
        soft_cap: float | None,
        kv_scales: Array | None,
        sinks: Array | None,
    ) -> "AttentionCall":
        """Return what is static about a call with these arguments."""
        num_tokens, num_q_heads, head_dim = q.shape
        return cls(
            num_tokens=num_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=kv_cache.shape[2],
            head_dim=head_dim,
            block_size=kv_cache.shape[3],
            q_dtype=str(q.dtype),
            kv_cache_dtype=str(kv_cache.dtype),
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            has_kv_scales=kv_scales is not None,
            has_sinks=sinks is not None,
            num_planes=kv_cache.shape[1],
        )
