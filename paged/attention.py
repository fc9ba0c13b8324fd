"""`ragged_paged_attention`: the public attention op, its checks and its dispatch.

Knows what every implementation promises and nothing about how one keeps it. An implementation is
a module with three functions: `plan`, which works out what all layers of a step share; `attend`;
and `unsupported`, which returns why `attend` cannot serve an `AttentionCall`, or None. It is
imported when it is considered.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from paged import backends
from paged.attention_call import AttentionCall

type AttentionPlan = Any
"""A pytree made by one backend's `plan` for its `attend`; opaque to everybody else."""

_MODULES: Mapping[str, str] = {
    "mosaic": "paged.mosaic.attention",
    "native": "paged.attention_native",
    "triton": "paged.triton.attention",
    "xla": "paged.attention_xla",
}


def ragged_paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv_cache: Float[Array, "num_blocks planes num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs max_blocks_per_seq"],
    seq_lens: Int[Array, " num_seqs"],
    query_start_loc: Int[Array, " num_seqs_plus_1"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Float[Array, "planes num_kv_heads"] | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    backend: str = "auto",
    plan: AttentionPlan | None = None,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal attention of a ragged batch of queries over a block-paged KV cache.

    Sequences of different lengths share the token axis: sequence i owns the rows
    `query_start_loc[i]:query_start_loc[i + 1]`. They are the last tokens of its context, which is
    the first `seq_lens[i]` tokens in the blocks that `block_tables[i]` lists, and which already
    holds the new tokens (call `write_kv` first). So row r of sequence i sits at position
    `seq_lens[i] - query_start_loc[i + 1] + r` and sees no later one. A sequence with one row is a
    decode, one with more is a prefill or a chunk of it, and a batch may mix them freely.

    Only shapes and keyword arguments are static, so one compiled program serves every batch of a
    bucket; the work follows the live contexts, not the width of the block table. The op can be
    used inside any `jax.jit`.

    Padding: a sequence with `seq_lens[i] == 0`, and rows from `query_start_loc[-1]` on, give
    zeros. What lies in slots past a sequence's context, in unowned blocks and in the null block
    reaches no output, not even as NaN. Entries of a block table past the context, or before the
    first position that a sliding window leaves visible, may name any block.

    Args:
      q: `[num_tokens, num_q_heads, head_dim]`, float32, bfloat16 or float16.
      kv_cache: one layer, `[num_blocks, planes, num_kv_heads, block_size, head_dim]`; the planes
        are keys and values, or one that is both. Query head n uses kv head
        `n // (num_q_heads // num_kv_heads)`.
      block_tables: int32 `[num_seqs, max_blocks_per_seq]`; position p of sequence i lies in block
        `block_tables[i, p // block_size]`. Sequences may share blocks.
      seq_lens: int32 `[num_seqs]`, context lengths, new tokens included.
      query_start_loc: int32 `[num_seqs + 1]`, prefix sums of the numbers of new tokens, from 0.
      scale: multiplies the logits; None is `head_dim ** -0.5`.
      sliding_window: a query sees this many of the most recent tokens, itself included; None: all.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, after the scale; None: as is.
      kv_scales: float32 `[planes, num_kv_heads]`, what the cached keys and values of a head are
        multiplied by, see `write_kv`; None: 1.
      sinks: `[num_q_heads]`, float; the softmax of a head also runs over one more key with this
        logit and the value zero (arXiv:2309.17453); no scale and no cap apply to it. None: no sink.
      backend: "auto": the platform's best implementation that serves this call; or the name of one
        as a promise: that one or an error. "native" is for arrays on one device: a jit with a
        mesh of several should say "xla".
      plan: `plan_attention` of the same batch, options and backend, for callers with many layers;
        None makes it here.

    Returns: `[num_tokens, num_q_heads, head_dim]` in q's dtype; softmax and sums are float32.

    Raises:
      ValueError: if shapes or keyword arguments break a rule above, or `backend` is unknown.
      TypeError: if an array has the wrong dtype.
      NotImplementedError: if `backend` cannot serve these arguments; the message gives the reason.

    Source: PagedAttention, arXiv:2309.06180; online softmax, arXiv:2205.14135.
    """
    _check_arrays(q, kv_cache)
    _check_tables(block_tables, seq_lens, query_start_loc)
    _check_options(scale, sliding_window, soft_cap)
    check_kv_scales(kv_scales, kv_cache)
    _check_sinks(sinks, q)
    call = AttentionCall.of(
        q,
        kv_cache,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        sinks=sinks,
    )
    implementation = _implementation(backend, call)
    if plan is None:
        plan = _plan(implementation, block_tables, seq_lens, query_start_loc, call)
    output: Array = implementation.attend(
        q,
        kv_cache,
        plan,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        sinks=sinks,
    )
    return output


def plan_attention(
    block_tables: Int[Array, "num_seqs max_blocks_per_seq"],
    seq_lens: Int[Array, " num_seqs"],
    query_start_loc: Int[Array, " num_seqs_plus_1"],
    call: AttentionCall,
    *,
    backend: str = "auto",
) -> AttentionPlan:
    """Return what `ragged_paged_attention` would work out about a batch anew in every layer.

    A model calls this once per step and hands the result to each of its layers; layers with
    different windows need different plans. The plan is a pytree whose content is the backend's.

    Args:
      block_tables, seq_lens, query_start_loc: as in `ragged_paged_attention`.
      call: what is static about the calls that the plan is for. All of it decides which backend
        "auto" is, so a plan that leaves something out may be another backend's.
      backend: as in `ragged_paged_attention`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `ragged_paged_attention`.
    """
    _check_tables(block_tables, seq_lens, query_start_loc)
    _check_options(None, call.sliding_window, call.soft_cap)
    return _plan(_implementation(backend, call), block_tables, seq_lens, query_start_loc, call)


def unsupported(name: str, call: AttentionCall) -> str | None:
    """Return why the backend of this name cannot serve `call`, or None."""
    reason: str | None = importlib.import_module(_MODULES[name]).unsupported(call)
    return reason


def _implementation(backend: str, call: AttentionCall) -> ModuleType:
    name = backends.resolve_backend(
        backend,
        backends.current_platform(),
        unsupported=lambda candidate: unsupported(candidate, call),
        fastest=backends.FASTEST_ATTENTION,
    )
    return importlib.import_module(_MODULES[name])


def _plan(
    implementation: ModuleType,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    call: AttentionCall,
) -> AttentionPlan:
    plan: AttentionPlan = implementation.plan(
        block_tables,
        seq_lens,
        query_start_loc,
        num_tokens=call.num_tokens,
        num_q_heads=call.num_q_heads,
        num_kv_heads=call.num_kv_heads,
        num_planes=call.num_planes,
        block_size=call.block_size,
        sliding_window=call.sliding_window,
    )
    return plan


def _check_arrays(q: Array, kv_cache: Array) -> None:
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}; it must be [num_tokens, num_q_heads, head_dim].")
    if kv_cache.ndim != 5 or kv_cache.shape[1] not in (1, 2):
        raise ValueError(
            f"kv_cache has shape {kv_cache.shape}; it must be one layer, "
            "[num_blocks, 1 or 2, num_kv_heads, block_size, head_dim]."
        )
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"q has dtype {q.dtype}; it must be float32, bfloat16 or float16.")
    if not jnp.issubdtype(kv_cache.dtype, jnp.floating):
        raise TypeError(f"kv_cache has dtype {kv_cache.dtype}; it must be a floating point type.")
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    if kv_cache.shape[4] != head_dim:
        raise ValueError(
            f"q has head_dim={head_dim} and kv_cache has head_dim={kv_cache.shape[4]}; "
            "they must be equal."
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}."
        )


def check_kv_scales(kv_scales: Array | None, kv_cache: Array) -> None:
    """Raise unless `kv_scales` is None or fits one layer of the cache."""
    if kv_scales is None:
        return
    if kv_scales.shape != kv_cache.shape[1:3]:
        raise ValueError(
            f"kv_scales has shape {kv_scales.shape}; it must be [planes, num_kv_heads] = "
            f"{kv_cache.shape[1:3]}."
        )
    if kv_scales.dtype != jnp.float32:
        raise TypeError(f"kv_scales has dtype {kv_scales.dtype}; it must be float32.")


def _check_sinks(sinks: Array | None, q: Array) -> None:
    if sinks is None:
        return
    if sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks has shape {sinks.shape}; it must be [num_q_heads] = [{q.shape[1]}]."
        )
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks has dtype {sinks.dtype}; it must be a floating point type.")


def _check_tables(block_tables: Array, seq_lens: Array, query_start_loc: Array) -> None:
    for name, array in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be int32.")
    if block_tables.ndim != 2 or 0 in block_tables.shape:
        raise ValueError(
            f"block_tables has shape {block_tables.shape}; it must be "
            "[num_seqs, max_blocks_per_seq], both at least 1."
        )
    num_seqs = block_tables.shape[0]
    for name, array, expected in (
        ("seq_lens", seq_lens, (num_seqs,)),
        ("query_start_loc", query_start_loc, (num_seqs + 1,)),
    ):
        if array.shape != expected:
            raise ValueError(
                f"{name} has shape {array.shape}; block_tables with {num_seqs} sequences asks "
                f"for {expected}."
            )


def _check_options(scale: float | None, sliding_window: int | None, soft_cap: float | None) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"scale={scale} must be positive; leave it out for head_dim ** -0.5.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window={sliding_window} must be at least 1 (a query sees itself); "
            "leave it out for full attention."
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive; leave it out for no cap.")
