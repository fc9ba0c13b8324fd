"""From logits to tokens: edits, penalties, masks, truncation, the draw, log probabilities.

All but the draw runs only if some row of the batch asks for it.
Nothing walks over the whole vocabulary more often than it must: the logits are seen as blocks of
64 tokens, whose maxima and masses, two passes over the logits, point to the few blocks that
matter. So 64 rows of 49152 logits take 3 ms on two shared Zen 5 cores, 6 with top-k or top-p, where
an argmax alone takes 3 ms and Gumbel noise for every token 50 ms.

Source: Gumbel-max trick, Gumbel 1954; repetition penalty, arXiv:1909.05858. Order of the stages:
vLLM `v1/worker/gpu/sample`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged.models.batch import SampledTokens, SamplingBatch, WideEdits
from paged.models.token_blocks import BLOCK, first_best, in_blocks, take_blocks
from paged.models.truncation import truncate

# Tokens of history that penalties count per iteration; they stop at the longest live history.
_HISTORY_CHUNK = 512

_MASK_BITS = 32  # tokens per word of a mask

# Biases of each row added per iteration; it stops at the longest list.
_BIAS_CHUNK = 128


def sample(
    compute_logits: Callable[[], Array],
    batch: SamplingBatch,
    history: Callable[[], Array],
    positions: Array,
    masks: Array,
    wide: WideEdits,
    *,
    max_logprobs: int,
) -> SampledTokens:
    """Draw one token per row.

    The stages, in this order: masks, allow-list and edits, penalties, temperature, min-p, top-k,
    top-p, the draw. Greedy rows (temperature 0) take the first largest logit after the penalties.
    What one stage has forbidden none of the next can allow.
    Log probabilities are of the masked logits before the other stages, as in the reference.

    Args:
      compute_logits: gives float32 `[num_seqs, vocab_size]`. They are changed in place, and
        computed again for log probabilities of a batch that changes them: keeping them would cost
        every batch a copy, which takes longer than the draw.
      batch: parameters by row.
      history: gives int32 `[num_seqs, max_len]`, the known tokens of each row by position; called
        inside the branch that needs it. Entries at `positions` and beyond may be anything.
      positions: position of the sampled token, which is the number of known tokens, int32
        `[num_seqs]`.
      masks: int32 `[num_seqs, mask_words(vocab_size)]`; bit i of word w of a row, from the lowest,
        allows token 32 * w + i. Read if `batch.uses_masks`.
      wide: edits of rows with many of them. Read if `batch.uses_wide_edits`.
      max_logprobs: alternatives reported per row.

    Returns:
      The tokens. A row's draw depends on its seed, its position and its logits alone.
    """
    raw = compute_logits()
    vocab_size = raw.shape[1]
    uses_edits, uses_penalties = _uses_edits(batch, vocab_size), _uses_penalties(batch)
    uses_masks, uses_wide = batch.uses_masks[0] > 0, batch.uses_wide_edits[0] > 0
    uses_edits |= uses_wide

    def edit(logits: Array) -> Array:
        masked = forbid(logits, masks, uses_masks)
        biased = _add_biases(forbid(masked, wide.allowed, uses_wide), wide, batch)
        return _edit(biased, batch)

    # In one branch: each costs a GPU a launch of its own, whether it is taken or not.
    logits = _change_if(uses_edits | uses_masks, edit, raw)
    logits = _change_if(uses_penalties, lambda x: _penalise(x, batch, history(), positions), logits)
    # Not in a branch even if all rows are greedy: XLA:CPU keeps branches to one thread.
    token_ids = _draw(logits, batch, positions)
    # A row without any possible token, or with NaN, would end in the padding of the last block.
    token_ids = jnp.minimum(token_ids, vocab_size - 1)

    def report() -> SampledTokens:
        def compute_masked() -> Array:
            return forbid(compute_logits(), masks, uses_masks)

        is_changed = uses_edits | uses_penalties
        unchanged = lax.cond(is_changed, lambda _: compute_masked(), lambda x: x, logits)
        return with_logprobs(unchanged, token_ids, max_logprobs=max_logprobs)

    wants_logprobs = batch.wants_logprobs[0] > 0
    report_none = functools.partial(_without_logprobs, token_ids, max_logprobs=max_logprobs)
    samples: SampledTokens = lax.cond(wants_logprobs, report, report_none)
    return samples


def _change_if(condition: Array, change: Callable[[Array], Array], logits: Array) -> Array:
    """Return the changed logits, or the logits.

    A loop of at most one round, because it works in place: a branch that only passes its argument
    on copies it (2 ms for 64 rows). The branch inside, always taken, keeps XLA from moving what
    does not depend on the logits out of the loop, where it would always run.
    """

    def visit(_: Array, logits: Array) -> Array:
        visited: Array = lax.cond(condition, change, lambda x: x, logits)
        return visited

    changed: Array = lax.fori_loop(0, condition.astype(jnp.int32), visit, logits)
    return changed


def _uses_edits(batch: SamplingBatch, vocab_size: int) -> Array:
    return (batch.edit_ids < vocab_size).any() | (batch.only_edits > 0).any()


def _edit(logits: Array, batch: SamplingBatch) -> Array:
    """Add the edit values; under an allow-list, forbid everything else."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    edited = logits.at[row, batch.edit_ids].add(batch.edit_values, mode="drop")
    listed = edited.at[row, batch.edit_ids].get(mode="clip")
    kept = jnp.where((batch.only_edits > 0)[:, None], -jnp.inf, edited)
    # Again, for the rows whose listed tokens have just been forbidden with the rest.
    return kept.at[row, batch.edit_ids].set(listed, mode="drop")


def _add_biases(logits: Array, wide: WideEdits, batch: SamplingBatch) -> Array:
    """Add the biases of wide edits, as many columns of them as some row uses."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def add(chunk: Array, logits: Array) -> Array:
        start = chunk * _BIAS_CHUNK
        ids, values = (
            lax.dynamic_slice_in_dim(array, start, _BIAS_CHUNK, axis=1)
            for array in (wide.bias_ids, wide.bias_values)
        )
        return logits.at[row, ids].add(values, mode="drop")

    num_chunks = (batch.num_wide_biases[0] + _BIAS_CHUNK - 1) // _BIAS_CHUNK
    biased: Array = lax.fori_loop(0, num_chunks, add, logits)
    return biased


def mask_words(vocab_size: int) -> int:
    """Return the int32 words of one row of masks."""
    return -(-vocab_size // _MASK_BITS)


def forbid(logits: Array, masks: Array, is_used: Array | None = None) -> Array:
    """Forbid the tokens whose bit is 0, unless masks are not used."""
    bits = (masks[:, :, None] >> jnp.arange(_MASK_BITS, dtype=jnp.int32)[None, None, :]) & 1
    is_allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] > 0
    if is_used is not None:
        is_allowed |= ~is_used
    return jnp.where(is_allowed, logits, -jnp.inf)


def _uses_penalties(batch: SamplingBatch) -> Array:
    is_used = batch.repetition_penalty != 1
    is_used |= batch.frequency_penalty != 0
    is_used |= batch.presence_penalty != 0
    return is_used.any()


def _penalise(logits: Array, batch: SamplingBatch, history: Array, positions: Array) -> Array:
    """Apply the repetition penalty to prompt and output, frequency and presence to the output."""
    known, outputs = _count_tokens(logits.shape, batch, history, positions)
    repetition = batch.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalised = jnp.where(known > 0, repeated, logits)
    penalised -= batch.frequency_penalty[:, None] * outputs.astype(jnp.float32)
    return penalised - batch.presence_penalty[:, None] * (outputs > 0).astype(jnp.float32)


def _count_tokens(
    shape: tuple[int, ...], batch: SamplingBatch, history: Array, positions: Array
) -> tuple[Array, Array]:
    """Return how often each token occurs so far, and in the output: int32 of `shape`."""
    # Whole chunks: a slice over the edge would be clamped, which shifts every token in it.
    history = jnp.pad(history, ((0, 0), (0, -history.shape[1] % _HISTORY_CHUNK)))
    row = jnp.arange(shape[0], dtype=jnp.int32)[:, None]

    def count(chunk: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        known, outputs = counts
        start = chunk * _HISTORY_CHUNK
        tokens = lax.dynamic_slice_in_dim(history, start, _HISTORY_CHUNK, axis=1)
        position = start + jnp.arange(_HISTORY_CHUNK, dtype=jnp.int32)[None, :]
        tokens = jnp.where(position < positions[:, None], tokens, shape[1])  # dropped
        is_output = (position >= batch.num_prompt_tokens[:, None]).astype(jnp.int32)
        return known.at[row, tokens].add(1, mode="drop"), outputs.at[row, tokens].add(
            is_output, mode="drop"
        )

    zeros = jnp.zeros(shape, jnp.int32)
    num_chunks = (positions.max() + _HISTORY_CHUNK - 1) // _HISTORY_CHUNK
    counted: tuple[Array, Array] = lax.fori_loop(0, num_chunks, count, (zeros, zeros))
    return counted


def _draw(logits: Array, batch: SamplingBatch, positions: Array) -> Array:
    """Draw a block by its mass, then a token of it: the Gumbel-max trick, twice.

    P(block) P(token | block) = P(token), so the draw is exact, and it needs noise for the blocks
    and for one of them instead of for every token. Greedy rows compare the logits themselves.
    """
    blocks = in_blocks(logits)
    # Without the barrier XLA reads all logits again for the largest of the blocks' maxima.
    best = lax.optimization_barrier(blocks.max(axis=2))  # type: ignore[no-untyped-call]
    num_blocks = blocks.shape[1]
    is_random = (batch.temperature > 0)[:, None]
    inverse_temperature = 1.0 / jnp.where(is_random, batch.temperature[:, None], 1.0)
    peak = best.max(axis=1, keepdims=True)
    mass, floor = truncate(blocks, best, inverse_temperature, batch)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(batch.seeds, positions, num_blocks + BLOCK)
    block = first_best(jnp.where(is_random, jnp.log(mass) + noise[:, :num_blocks], best))

    tokens = take_blocks(blocks, block[:, None])
    scaled = (tokens - peak) * inverse_temperature + noise[:, num_blocks:]
    scaled = jnp.where(tokens >= floor, scaled, -jnp.inf)
    return block * BLOCK + first_best(jnp.where(is_random, scaled, tokens))


def _gumbel(seed: Array, position: Array, size: int) -> Array:
    """Return standard Gumbel noise `[size]`, a function of seed and position."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,), jnp.float32)


def _without_logprobs(token_ids: Array, *, max_logprobs: int) -> SampledTokens:
    num_seqs = token_ids.shape[0]
    return SampledTokens(
        token_ids=token_ids,
        logprobs=jnp.zeros(num_seqs, jnp.float32),
        ranks=jnp.zeros(num_seqs, jnp.int32),
        top_ids=jnp.zeros((num_seqs, max_logprobs), jnp.int32),
        top_logprobs=jnp.zeros((num_seqs, max_logprobs), jnp.float32),
    )


def with_logprobs(logits: Array, token_ids: Array, *, max_logprobs: int) -> SampledTokens:
    """Return tokens with their log probabilities under these logits.

    Args:
      logits: float32 `[num_rows, vocab_size]`.
      token_ids: int32 `[num_rows]`, one per row.
      max_logprobs: alternatives reported per row.
    """
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    sampled = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    top, top_ids = _top_tokens(logits, min(max_logprobs, logits.shape[1]))
    padding = ((0, 0), (0, max_logprobs - top.shape[1]))
    return SampledTokens(
        token_ids=token_ids,
        logprobs=(sampled - normaliser)[:, 0],
        ranks=(logits >= sampled).sum(axis=1, dtype=jnp.int32),
        top_ids=jnp.pad(top_ids, padding),
        top_logprobs=jnp.pad(top - normaliser, padding, constant_values=-jnp.inf),
    )


def _top_tokens(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the largest logits of each row and their ids, lower ids first among equals."""
    blocks = in_blocks(logits)
    # They lie in the `count` blocks with the largest maxima; in order of id, as ties are.
    block = lax.top_k(blocks.max(axis=2), min(count, blocks.shape[1]))[1]
    block = jnp.sort(block, axis=1)
    top, index = lax.top_k(take_blocks(blocks, block), count)
    return top, jnp.take_along_axis(block, index // BLOCK, axis=1) * BLOCK + index % BLOCK
