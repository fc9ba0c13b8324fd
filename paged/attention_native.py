"""Ragged paged attention by the C++ kernel, on a CPU (docs/decisions/0027).

The kernel lists its work itself, in microseconds, from tables that are read anyway; so a plan is
those tables, and nothing in it depends on the layer.
"""

from jax import Array

from paged.attention_call import AttentionCall
from paged.native.attention import CACHE_DTYPES, QUERY_DTYPES, paged_attention

type AttentionPlan = tuple[Array, Array, Array]
"""Block tables, context lengths, and starts of the queries."""


def unsupported(call: AttentionCall) -> str | None:
    """Return why `attend` cannot serve a call, or None: only the element types matter."""
    if call.q_dtype not in QUERY_DTYPES:
        return f"it computes in {' or '.join(QUERY_DTYPES)}, not in {call.q_dtype}"
    if call.kv_cache_dtype not in CACHE_DTYPES:
        return f"it reads a cache of {', '.join(CACHE_DTYPES)}, not of {call.kv_cache_dtype}"
    return None


def plan(
    block_tables: Array, seq_lens: Array, query_start_loc: Array, **shapes: int | None
) -> AttentionPlan:
    """Return the tables of a batch, as `paged.attention.plan_attention` documents."""
    del shapes
    return block_tables, seq_lens, query_start_loc


def attend(
    q: Array,
    kv_cache: Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Array | None,
    sinks: Array | None,
) -> Array:
    """Return the attention that `paged.attention.ragged_paged_attention` documents."""
    return paged_attention(
        q,
        kv_cache,
        *plan,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        sinks=sinks,
    )
