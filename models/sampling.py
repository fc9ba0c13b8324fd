"""From logits to tokens, on the device: edits, penalties, truncation, the draw, log probabilities.

Each stage runs only if some row of the batch asks for it (`lax.cond`), so that a greedy batch
costs one pass over the logits. The vocabulary is never sorted: the k-th largest value and the edge
of the top-p set are found by bisection, 32 passes that each halve the range of possible floats.

Source: Gumbel-max trick, Gumbel 1954; top-p, arXiv:1904.09751; min-p, arXiv:2407.01082;
repetition penalty, arXiv:1909.05858. Order of the stages: vLLM `v1/worker/gpu/sample`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from paged.models.batch import SampledTokens, SamplingBatch

_NEVER = -jnp.inf


def sample(
    logits: Array,
    batch: SamplingBatch,
    history: Callable[[], Array],
    positions: Array,
    *,
    max_logprobs: int,
) -> SampledTokens:
    """Draw one token per row.

    Args:
      logits: float32 `[num_seqs, vocab_size]`.
      batch: parameters by row.
      history: gives int32 `[num_seqs, max_len]`, the known tokens of each row by position; called
        inside the branch that needs it. Entries at `positions` and beyond may be anything.
      positions: position of the sampled token, which is the number of known tokens, int32
        `[num_seqs]`.
      max_logprobs: alternatives reported per row.

    Returns:
      The tokens. A seeded row's draw depends on its seed, its position and its logits alone.
    """
    raw = logits
    logits = _edit(logits, batch)
    logits = _penalise(logits, batch, history, positions)
    token_ids = jax.lax.cond(
        (batch.temperature > 0).any(), _draw, _greedy, logits, batch, positions
    )
    num_seqs = logits.shape[0]

    def report(raw: Array, token_ids: Array) -> SampledTokens:
        return _with_logprobs(raw, token_ids, max_logprobs)

    def report_none(raw: Array, token_ids: Array) -> SampledTokens:
        zeros = jnp.zeros((num_seqs,), jnp.float32)
        top = jnp.zeros((num_seqs, max_logprobs), jnp.float32)
        return SampledTokens(token_ids, zeros, zeros.astype(jnp.int32), top.astype(jnp.int32), top)

    return jax.lax.cond(batch.wants_logprobs[0] > 0, report, report_none, raw, token_ids)


def argmax(logits: Array) -> Array:
    """Return the first index of the largest value of each row, int32 `[num_seqs]`.

    XLA's own argmax is a scalar loop on CPUs, several times slower than these three reductions.
    """
    vocab_size = logits.shape[-1]
    index = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]
    is_best = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(is_best, index, vocab_size - 1).min(axis=-1)


def _greedy(logits: Array, batch: SamplingBatch, positions: Array) -> Array:
    del batch, positions
    return argmax(logits)


def _edit(logits: Array, batch: SamplingBatch) -> Array:
    """Add the edit values; under an allow-list, forbid everything else."""
    vocab_size = logits.shape[-1]

    def edit(logits: Array) -> Array:
        row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        listed = jnp.zeros(logits.shape, bool).at[row, batch.edit_ids].set(True, mode="drop")
        allowed = listed | (batch.only_edits == 0)[:, None]
        kept = jnp.where(allowed, logits, _NEVER)
        return kept.at[row, batch.edit_ids].add(batch.edit_values, mode="drop")

    return jax.lax.cond((batch.edit_ids < vocab_size).any(), edit, lambda x: x, logits)


def _penalise(
    logits: Array, batch: SamplingBatch, history: Callable[[], Array], positions: Array
) -> Array:
    """Apply repetition, frequency and presence penalties."""

    def penalise(logits: Array) -> Array:
        tokens = history()
        row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        known = place < positions[:, None]
        is_output = known & (place >= batch.num_prompt_tokens[:, None])
        nowhere = logits.shape[1]  # dropped by the scatters

        def occurrences(mask: Array) -> Array:
            counts = jnp.zeros(logits.shape, jnp.float32)
            return counts.at[row, jnp.where(mask, tokens, nowhere)].add(1.0, mode="drop")

        repetition = batch.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(occurrences(known) > 0, repeated, logits)
        outputs = occurrences(is_output)
        logits = logits - batch.frequency_penalty[:, None] * outputs
        return logits - batch.presence_penalty[:, None] * (outputs > 0).astype(jnp.float32)

    is_used = (
        (batch.repetition_penalty != 1)
        | (batch.frequency_penalty != 0)
        | (batch.presence_penalty != 0)
    )
    return jax.lax.cond(is_used.any(), penalise, lambda x: x, logits)


def _draw(logits: Array, batch: SamplingBatch, positions: Array) -> Array:
    """Draw from the tempered and truncated distribution; greedy rows take the largest logit."""
    is_random = (batch.temperature > 0)[:, None]
    scaled = logits / jnp.where(is_random, batch.temperature[:, None], 1.0)
    truncates = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    scaled = jax.lax.cond(truncates.any(), _truncate, lambda x, _: x, scaled, batch)
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(batch.seeds, positions, logits.shape[1])
    return argmax(jnp.where(is_random, scaled + noise, scaled))


def _noise(seed: Array, position: Array, vocab_size: int) -> Array:
    """Return standard Gumbel noise `[vocab_size]`, a function of seed and position."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)


def _truncate(logits: Array, batch: SamplingBatch) -> Array:
    """Forbid what min-p, top-k and top-p exclude, in this order; the best token always stays."""
    best = logits.max(axis=-1, keepdims=True)
    # A probability of min_p times the best one's, in logits; log(0) excludes nothing.
    logits = jnp.where(logits < best + jnp.log(batch.min_p[:, None]), _NEVER, logits)
    top_k = jnp.where(batch.top_k > 0, batch.top_k, logits.shape[1])[:, None]
    logits = _keep_heaviest(logits, jnp.ones_like(logits), top_k.astype(jnp.float32))
    weights = jnp.exp(logits - best)
    target = batch.top_p[:, None] * weights.sum(axis=-1, keepdims=True)
    target = jnp.where(batch.top_p[:, None] < 1, target, jnp.inf)
    return _keep_heaviest(logits, weights, target)


def _keep_heaviest(logits: Array, weights: Array, target: Array) -> Array:
    """Forbid all but the largest logits whose weights together reach `target` `[num_seqs, 1]`.

    Bisects on the order-preserving integer view of float32 for the largest threshold at which the
    weights of all logits at or above it reach the target. Ties at the threshold stay; if the
    target is never reached, everything stays.
    """
    ordered = _ordered_bits(logits)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the weights at or above `low` reach the target, those at `high` do not
        middle = low // 2 + high // 2 + (low & high & 1)
        reached = jnp.where(ordered >= middle, weights, 0.0).sum(axis=-1, keepdims=True) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    shape = target.shape
    low = jnp.full(shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    high = _ordered_bits(logits.max(axis=-1, keepdims=True)) + 1
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(ordered >= low, logits, _NEVER)


def _ordered_bits(values: Array) -> Array:
    """Return int32s that compare as the float32 values do."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _with_logprobs(raw: Array, token_ids: Array, max_logprobs: int) -> SampledTokens:
    logprobs = jax.nn.log_softmax(raw, axis=-1)
    sampled = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = (logprobs >= sampled).sum(axis=-1, dtype=jnp.int32)
    count = min(max_logprobs, raw.shape[1])
    top, top_ids = jax.lax.top_k(logprobs, count)
    padding = ((0, 0), (0, max_logprobs - count))
    return SampledTokens(
        token_ids=token_ids,
        logprobs=sampled[:, 0],
        ranks=ranks,
        top_ids=jnp.pad(top_ids, padding),
        top_logprobs=jnp.pad(top, padding, constant_values=_NEVER),
    )
