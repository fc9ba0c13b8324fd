"""`ragged_paged_attention`: the one attention op, its argument checks and its dispatch."""

import importlib
from types import ModuleType

import jax.numpy as jnp
from jax import Array

from paged.backends import XLA, resolve_backend

# Modules are imported when chosen, so that nobody needs the libraries of the others.
_MODULES = {XLA: "paged.attention_xla"}


def ragged_paged_attention(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
) -> Array:
    """Causal attention of packed queries over a block-paged KV cache.

    Sequences of different lengths share the token axis, prefill chunks and decodes alike. Sequence
    i owns rows `query_start_loc[i]:query_start_loc[i + 1]`, the last of its first `seq_lens[i]`
    tokens, and attends to those tokens, which must all be in the cache already: call `write_kv`
    first. Slots beyond them are never read into a result, whatever they hold.

        kv_cache = write_kv(kv_cache, k, v, slot_mapping)
        mixed = ragged_paged_attention(q, kv_cache, block_tables, seq_lens, query_start_loc)

    Args:
      q: `[num_tokens, num_q_heads, head_dim]`, float32, bfloat16 or float16. The q heads of one kv
        head are neighbours: head n reads kv head `n // (num_q_heads // num_kv_heads)`.
      kv_cache: one layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; keys at 0 and
        values at 1.
      block_tables: block ids by sequence in token order, int32 `[num_seqs, max_blocks_per_seq]`;
        entries past a sequence's length may be any block id.
      seq_lens: context lengths including this step, int32 `[num_seqs]`; 0 for padding.
      query_start_loc: prefix sums of the query lengths, int32 `[num_seqs + 1]`; padding sequences
        repeat the last value.
      scale: multiplies the logits; None is `head_dim ** -0.5`.
      sliding_window: most recent tokens, itself included, that a query sees; None is all.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None leaves them.
      backend: "auto", or a backend's name as a promise.

    Returns:
      `[num_tokens, num_q_heads, head_dim]` in q's dtype; softmax and sums are float32. Rows that
      no sequence owns are finite.

    Raises:
      ValueError: for shapes or options that make no sense together.
      TypeError: for dtypes that are not supported.
      NotImplementedError: if `backend` names one that cannot serve these shapes here.

    Source: PagedAttention, arXiv:2309.06180; online softmax, arXiv:2205.14135.
    """
    _check_arrays(q, kv_cache, block_tables, seq_lens, query_start_loc)
    _check_options(sliding_window, soft_cap)
    head_dim = q.shape[-1]
    name = resolve_backend(backend)
    module = _backend_module(name)
    reason = module.unsupported(head_dim, kv_cache.shape[3], str(q.dtype))
    if reason is not None:
        raise NotImplementedError(f"attention backend {name!r} cannot serve this call: {reason}.")
    attended: Array = module.attend(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        scale=head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    return attended


def _backend_module(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name])


def _check_arrays(
    q: Array, kv_cache: Array, block_tables: Array, seq_lens: Array, query_start_loc: Array
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}, expected [num_tokens, num_q_heads, head_dim].")
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
        raise ValueError(
            f"kv_cache has shape {kv_cache.shape}, expected "
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]."
        )
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"q is {q.dtype}, expected float32, bfloat16 or float16.")
    if not jnp.issubdtype(kv_cache.dtype, jnp.floating):
        raise TypeError(f"kv_cache is {kv_cache.dtype}, expected a floating dtype.")
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    if kv_cache.shape[4] != head_dim:
        raise ValueError(f"q has head_dim {head_dim}, but kv_cache has {kv_cache.shape[4]}.")
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}."
        )
    num_seqs = seq_lens.shape[0]
    if seq_lens.ndim != 1 or num_seqs < 1:
        raise ValueError(f"seq_lens has shape {seq_lens.shape}, expected [num_seqs >= 1].")
    if block_tables.ndim != 2 or block_tables.shape[0] != num_seqs:
        raise ValueError(
            f"block_tables has shape {block_tables.shape}, expected "
            f"[num_seqs={num_seqs}, max_blocks_per_seq]."
        )
    if query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(
            f"query_start_loc has shape {query_start_loc.shape}, expected "
            f"[num_seqs + 1 = {num_seqs + 1}]."
        )
    for name, array in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} is {array.dtype}, expected int32.")


def _check_options(sliding_window: int | None, soft_cap: float | None) -> None:
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window} must be at least 1, or None for all.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be greater than 0, or None for no cap.")
