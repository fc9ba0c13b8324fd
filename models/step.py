"""The programs of an engine step, and the only place that jits a model.

A step is two programs. `forward_step` runs the model and is compiled per bucket. What follows
needs only the final hidden rows where sequences end, and is compiled once per number of sequences,
which several buckets share: `greedy_step` if every sequence takes its likeliest token, which the
host knows, else `sample_step`, which can do everything (docs/decisions/0024). `resize_step` lies
between them where the bucket has room for more sequences than there are. Each is dispatched
behind the one before without waiting, and what lies between never leaves the device. Nor
need its tokens, to be the next step's input: `last_tokens` keeps them by batch row
(docs/decisions/0016).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from paged.kv_cache import KVCache
from paged.models.batch import SampledTokens, WideEdits
from paged.models.forward import HeadDef, forward
from paged.models.lora import LoRAStack
from paged.models.packing import BatchLayout, in_flight
from paged.models.programs import Program, ProgramSource
from paged.models.sampling import mask_words, sample

type Forward = Callable[
    [tuple[Array, ...], KVCache, np.ndarray, Array], tuple[Array, Array, KVCache, Array]
]
"""Compiled `forward_step`: (parameter leaves, cache, packed inputs, last tokens) to its results."""

type Resize = Callable[[Array, Array], tuple[Array, Array]]
"""Compiled `resize_step`: (hidden rows, packed rows) of another number of sequences."""

type Greedy = Callable[[Any, Array, Array, Array], tuple[Array, Array]]
"""Compiled `greedy_step`: (head parameters, hidden rows, packed rows, last tokens)."""

type Sample = Callable[
    [Any, Array, Array, Array, Array, Array | np.ndarray, WideEdits], tuple[SampledTokens, Array]
]
"""Compiled `sample_step`: as `Greedy`, with the cached token ids before the last tokens, and masks
and wide edits after them."""


def forward_step(
    leaves: tuple[Array, ...],
    kv_cache: KVCache,
    packed: Array,
    last_tokens: Array,
    *,
    treedef: Any,
    graphdef: Any,
    layout: BatchLayout,
) -> tuple[Array, Array, KVCache, Array]:
    """Run the model over one packed batch and write its keys and values.

    Args:
      leaves: the model's parameters and its adapters, see `step_leaves`, flattened: a tuple of
        arrays is flattened in C++ at every call, a nested state in Python.
      kv_cache: donated; use the returned one from then on.
      packed: int32 `[layout.size]`, see `BatchLayout`.
      last_tokens: the last sample of each batch row, int32 `[max_num_seqs]`; stands in for token
        ids that were in flight when the batch was built.
      treedef, graphdef: structure of what was flattened, and of the model (static).
      layout: the static shapes.

    Returns:
      The final hidden states where each sequence ends, `[num_seqs, hidden_size]` (padding rows
      hold garbage), the part of `packed` that describes sequences, int32 `[layout.rows_size]`,
      the cache, and the final hidden states of all tokens, `[num_tokens, hidden_size]`, for
      those whose prompt is scored (docs/decisions/0038).
    """
    params, loras = jax.tree.unflatten(treedef, leaves)
    batch = layout.unpack_forward(packed)
    batch = dataclasses.replace(batch, token_ids=_resolve(batch.token_ids, last_tokens))
    hidden, kv_cache = forward(graphdef, params, kv_cache, batch, loras)
    return hidden[batch.logits_indices], packed[: layout.rows_size], kv_cache, hidden


def step_leaves(params: Any, loras: LoRAStack | None) -> tuple[tuple[Array, ...], Any]:
    """Return the first argument of `forward_step`, and its structure.

    Args:
      params: the model's parameters.
      loras: its adapters; None: there are none.
    """
    leaves, treedef = jax.tree.flatten((params, loras))
    return tuple(leaves), treedef


def _resolve(token_ids: Array, last_tokens: Array) -> Array:
    """Replace the ids that `in_flight` made by the tokens they stand for."""
    rows = in_flight(token_ids)  # its own inverse
    # Known tokens are clipped to row 0, which `where` ignores.
    sampled = last_tokens.at[rows].get(mode="clip", wrap_negative_indices=False)
    return jnp.where(token_ids < 0, sampled, token_ids)


def resize_step(
    hidden: Array, rows: Array, *, layout: BatchLayout, num_seqs: int
) -> tuple[Array, Array]:
    """Cut or pad what lies between the two programs of a step to `num_seqs` sequences.

    Args:
      hidden, rows: as `forward_step` with `layout` returns them.
      layout, num_seqs: static.

    Returns:
      Hidden rows `[num_seqs, hidden_size]` and int32 rows for a layout of as many sequences.
    """
    missing = max(0, num_seqs - layout.num_seqs)
    hidden = jnp.pad(hidden[:num_seqs], ((0, missing), (0, 0)))
    return hidden, layout.resize_rows(rows, num_seqs)


def greedy_step(
    head_params: Any,
    hidden: Array,
    rows: Array,
    last_tokens: Array,
    *,
    head: HeadDef,
    layout: BatchLayout,
) -> tuple[Array, Array]:
    """Take the likeliest token of every sequence; what the sampling rows say is not read.

    Args:
      head_params, hidden, rows, last_tokens, head, layout: as in `sample_step`.

    Returns:
      Token ids, int32 `[num_seqs]`, and `last_tokens` with those of the sequences that keep one.
    """
    token_ids = nnx.merge(head, head_params).best_tokens(hidden)
    return token_ids, _keep(last_tokens, layout.unpack_sampled_rows(rows), token_ids)


def sample_step(
    head_params: Any,
    hidden: Array,
    rows: Array,
    cached_token_ids: Array,
    last_tokens: Array,
    masks: Array,
    wide: WideEdits,
    *,
    head: HeadDef,
    layout: BatchLayout,
    max_logprobs: int,
) -> tuple[SampledTokens, Array]:
    """Draw one token per sequence.

    Args:
      head_params: parameters of the head.
      hidden: final hidden rows, `[num_seqs, hidden_size]`, from `forward_step`.
      rows: int32 `[layout.rows_size]`, from `forward_step`.
      cached_token_ids: `KVCache.token_ids`, int32 `[num_blocks, block_size]`, this step's included.
      last_tokens: the last sample of each batch row, int32 `[max_num_seqs]`.
      masks: which tokens each sequence may take, see `sample`; of a batch without such sequences
        anything of that shape.
      wide: edits of sequences with many of them, see `sample`; likewise.
      head: structure of the head (static).
      layout: the static shapes; only those of sequences matter.
      max_logprobs: alternatives reported per position when a row asks for log probabilities.

    Returns:
      The samples, and `last_tokens` with those of the sequences that keep one.
    """
    sampling, block_tables, seq_lens = layout.unpack_sampling(rows)

    def history() -> Array:  # [num_seqs, max_blocks_per_seq * block_size]
        return cached_token_ids[block_tables].reshape(block_tables.shape[0], -1)

    def compute_logits() -> Array:
        return nnx.merge(head, head_params).logits(hidden)

    # The sampled token's position is the number of tokens known so far.
    samples = sample(
        compute_logits, sampling, history, seq_lens, masks, wide, max_logprobs=max_logprobs
    )
    return samples, _keep(last_tokens, layout.unpack_sampled_rows(rows), samples.token_ids)


def _keep(last_tokens: Array, sampled_rows: Array, token_ids: Array) -> Array:
    return last_tokens.at[sampled_rows].set(token_ids, mode="drop")


def compile_forward(
    store: ProgramSource,
    graphdef: Any,
    params: Any,
    kv_cache: KVCache,
    layout: BatchLayout,
    *,
    max_num_seqs: int,
    loras: LoRAStack | None = None,
) -> Forward:
    """Compile `forward_step` for one layout ahead of time, or load it; the cache is donated.

    Args:
      store: makes or keeps compiled programs.
      graphdef, params: the split model; `params` may be arrays or their abstract shapes.
      kv_cache: the cache, or its abstract shape.
      layout: the static shapes.
      max_num_seqs: batch rows.
      loras: the model's adapters, if it has such.
    """
    leaves, treedef = step_leaves(params, loras)
    step = functools.partial(forward_step, treedef=treedef, graphdef=graphdef, layout=layout)
    arguments = leaves, kv_cache, layout.empty(), np.zeros(max_num_seqs, np.int32)
    outputs = 0, 0, kv_cache, 0
    program = Program(f"forward {layout}", step, arguments, outputs, donated=(1,))
    compiled: Forward = store.make(program)
    return compiled


def compile_resize(
    store: ProgramSource, head: HeadDef, head_params: Any, layout: BatchLayout, *, num_seqs: int
) -> Resize:
    """Compile `resize_step` from the sequences of `layout` to `num_seqs`, or load it.

    Args:
      store, head, head_params, layout: as in `compile_greedy`.
      num_seqs: see `resize_step`.
    """
    step = functools.partial(resize_step, layout=layout, num_seqs=num_seqs)
    hidden, rows, _ = _head_inputs(head, head_params, layout, 0)
    program = Program(f"resize {layout} {num_seqs}", step, (hidden, rows), (0, 0))
    compiled: Resize = store.make(program)
    return compiled


def compile_greedy(
    store: ProgramSource,
    head: HeadDef,
    head_params: Any,
    layout: BatchLayout,
    *,
    max_num_seqs: int,
) -> Greedy:
    """Compile `greedy_step` for the number of sequences of `layout` ahead of time, or load it.

    Args:
      store: makes or keeps compiled programs.
      head, head_params: see `paged.models.forward.split_head`.
      layout: the static shapes.
      max_num_seqs: batch rows.
    """
    step = functools.partial(greedy_step, head=head, layout=layout)
    hidden, rows, last_tokens = _head_inputs(head, head_params, layout, max_num_seqs)
    arguments = head_params, hidden, rows, last_tokens
    compiled: Greedy = store.make(Program(f"greedy {layout}", step, arguments, (0, 0)))
    return compiled


def compile_sample(
    store: ProgramSource,
    head: HeadDef,
    head_params: Any,
    kv_cache: KVCache,
    layout: BatchLayout,
    *,
    max_num_seqs: int,
    max_logprobs: int,
) -> Sample:
    """Compile `sample_step` for the number of sequences of `layout` ahead of time, or load it.

    Args:
      store, head, head_params, layout, max_num_seqs: as in `compile_greedy`.
      kv_cache: the cache, or its abstract shape.
      max_logprobs: see `sample_step`.
    """
    step = functools.partial(sample_step, head=head, layout=layout, max_logprobs=max_logprobs)
    hidden, rows, last_tokens = _head_inputs(head, head_params, layout, max_num_seqs)
    masks = np.zeros((layout.num_seqs, mask_words(layout.vocab_size)), np.int32)
    wide = layout.empty_wide_edits()
    arguments = head_params, hidden, rows, kv_cache.token_ids, last_tokens, masks, wide
    outputs = SampledTokens(0, 0, 0, 0, 0), 0  # type: ignore[arg-type]
    program = Program(f"sample {layout} {max_logprobs}", step, arguments, outputs)
    compiled: Sample = store.make(program)
    return compiled


def _head_inputs(
    head: HeadDef, head_params: Any, layout: BatchLayout, max_num_seqs: int
) -> tuple[jax.ShapeDtypeStruct, np.ndarray, np.ndarray]:
    """Return the shapes of hidden rows, packed rows and last tokens."""
    embed = nnx.merge(head, head_params)
    hidden = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (layout.num_seqs, embed.hidden_size), embed.dtype
    )
    return hidden, layout.empty()[: layout.rows_size], np.zeros(max_num_seqs, np.int32)
