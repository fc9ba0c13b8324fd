"""From logits to tokens, on the device: edits, penalties, truncation, the draw, log probabilities.

Each stage runs only if some row of the batch asks for it, so a greedy batch reads its logits once.
Nothing walks over the whole vocabulary more often than it must: the logits are seen as blocks of
64 tokens, whose maxima or masses point to the few blocks that matter. So 64 rows of 49152 logits
take 0.8 ms greedy and 12 ms random on two Zen 5 cores, most of the 12 in page faults of fresh
temporaries; an argmax alone takes 3 ms and Gumbel noise for every token 50 ms.

Source: Gumbel-max trick, Gumbel 1954; top-p, arXiv:1904.09751; min-p, arXiv:2407.01082;
repetition penalty, arXiv:1909.05858. Order of the stages: vLLM `v1/worker/gpu/sample`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged.models.batch import SampledTokens, SamplingBatch
from paged.models.token_blocks import BLOCK, first_best, in_blocks, take_best, take_blocks

# Blocks that truncation looks at first. A vocabulary of 49152 has 768 blocks, and 64 of them are
# 4096 candidates: a twelfth of the work of each of the 32 rounds of a search.
_CANDIDATE_BLOCKS = 64

# Tokens of history that penalties count per iteration; they stop at the longest live history.
_HISTORY_CHUNK = 512


def sample(
    logits: Array,
    batch: SamplingBatch,
    history: Callable[[], Array],
    positions: Array,
    *,
    max_logprobs: int,
) -> SampledTokens:
    """Draw one token per row.

    The stages, in this order: allow-list and edits, penalties, temperature, min-p, top-k, top-p,
    the draw. Greedy rows (temperature 0) take the first largest logit after the penalties.

    Args:
      logits: float32 `[num_seqs, vocab_size]`.
      batch: parameters by row.
      history: gives int32 `[num_seqs, max_len]`, the known tokens of each row by position; called
        inside the branch that needs it. Entries at `positions` and beyond may be anything.
      positions: position of the sampled token, which is the number of known tokens, int32
        `[num_seqs]`.
      max_logprobs: alternatives reported per row.

    Returns:
      The tokens. A row's draw depends on its seed, its position and its logits alone.
    """
    is_processed = _uses_edits(batch, logits.shape[1]) | _uses_penalties(batch)

    def process(logits: Array) -> Array:
        return _penalise(_edit(logits, batch), batch, history, positions)

    def process_and_draw(logits: Array) -> Array:
        # A branch that only passes the logits on copies them (2 ms for 64 rows): the price for
        # compiling the draw once instead of twice in each of an engine's programs.
        return _draw(lax.cond(is_processed, process, lambda x: x, logits), batch, positions)

    is_plain = ~is_processed & (batch.temperature <= 0).all()
    token_ids = lax.cond(is_plain, take_best, process_and_draw, logits)
    # A row without any possible token, or with NaN, would end in the padding of the last block.
    token_ids = jnp.minimum(token_ids, logits.shape[1] - 1)
    report = functools.partial(_with_logprobs, max_logprobs=max_logprobs)
    report_none = functools.partial(_without_logprobs, max_logprobs=max_logprobs)
    wants = batch.wants_logprobs[0] > 0
    samples: SampledTokens = lax.cond(wants, report, report_none, logits, token_ids)
    return samples


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


def _uses_penalties(batch: SamplingBatch) -> Array:
    is_used = batch.repetition_penalty != 1
    is_used |= batch.frequency_penalty != 0
    is_used |= batch.presence_penalty != 0
    return is_used.any()


def _penalise(
    logits: Array, batch: SamplingBatch, history: Callable[[], Array], positions: Array
) -> Array:
    """Apply the repetition penalty to prompt and output, frequency and presence to the output."""

    def penalise(logits: Array) -> Array:
        known, outputs = _count_tokens(logits.shape, batch, history(), positions)
        repetition = batch.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        penalised = jnp.where(known > 0, repeated, logits)
        penalised -= batch.frequency_penalty[:, None] * outputs.astype(jnp.float32)
        return penalised - batch.presence_penalty[:, None] * (outputs > 0).astype(jnp.float32)

    penalised: Array = lax.cond(_uses_penalties(batch), penalise, lambda logits: logits, logits)
    return penalised


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
    best = blocks.max(axis=2)
    num_blocks = blocks.shape[1]
    is_random = (batch.temperature > 0)[:, None]
    inverse_temperature = 1.0 / jnp.where(is_random, batch.temperature[:, None], 1.0)
    peak = best.max(axis=1, keepdims=True)
    floor = _truncation_floor(blocks, best, peak, inverse_temperature, batch)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(batch.seeds, positions, num_blocks + BLOCK)

    weights = jnp.exp((blocks - peak[:, :, None]) * inverse_temperature[:, :, None])
    mass = jnp.where(blocks >= floor[:, :, None], weights, 0.0).sum(axis=2)
    block = first_best(jnp.where(is_random, jnp.log(mass) + noise[:, :num_blocks], best))

    tokens = take_blocks(blocks, block[:, None])
    scaled = (tokens - peak) * inverse_temperature + noise[:, num_blocks:]
    scaled = jnp.where(tokens >= floor, scaled, -jnp.inf)
    return block * BLOCK + first_best(jnp.where(is_random, scaled, tokens))


def _gumbel(seed: Array, position: Array, size: int) -> Array:
    """Return standard Gumbel noise `[size]`, a function of seed and position."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,), jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Logits:
    """The logits of each row, and the few of them among which a threshold mostly lies."""

    everything: Array  # [num_seqs, vocab_size, rounded up to whole blocks]
    candidates: Array  # [num_seqs, up to 4096] the blocks with the largest maxima
    cut: Array  # [num_seqs, 1] all logits above it are candidates
    peak: Array  # [num_seqs, 1] the largest
    inverse_temperature: Array  # [num_seqs, 1]

    def weigh(self, values: Array, floor: Array) -> Array:
        """Return probabilities of logits relative to the best one's, 0 below `floor`."""
        weights = jnp.exp((values - self.peak) * self.inverse_temperature)
        return jnp.where(values >= floor, weights, 0.0)


def _truncation_floor(
    blocks: Array, best: Array, peak: Array, inverse_temperature: Array, batch: SamplingBatch
) -> Array:
    """Return the smallest logit that min-p, top-k and top-p leave, float32 `[num_seqs, 1]`.

    Ties at the floor stay, and so does the best token.
    """
    # A probability of min_p times the best one's, in logits; log(0) excludes nothing.
    floor = peak + jnp.log(batch.min_p[:, None]) / inverse_temperature

    def search(floor: Array) -> Array:
        num_candidates = min(_CANDIDATE_BLOCKS, best.shape[1])
        block_best, block = lax.top_k(best, num_candidates)
        everything, candidates = blocks.reshape(blocks.shape[0], -1), take_blocks(blocks, block)
        is_all = candidates.shape == everything.shape
        cut = jnp.full_like(peak, -jnp.inf) if is_all else block_best[:, -1:]
        logits = _Logits(everything, candidates, cut, peak, inverse_temperature)
        # Each candidate block offers its maximum, so they hold the `num_candidates` largest.
        largest_near_k = everything.shape[1] if is_all else num_candidates
        floor = jnp.maximum(floor, _top_k_floor(logits, batch.top_k[:, None], largest_near_k))
        return jnp.maximum(floor, _top_p_floor(logits, batch.top_p[:, None], floor))

    truncates = (batch.top_k > 0) | (batch.top_p < 1)
    found: Array = lax.cond(truncates.any(), search, lambda floor: floor, floor)
    return found


def _top_k_floor(logits: _Logits, top_k: Array, largest_near_k: int) -> Array:
    """Return the k-th largest logit of each row with a top-k, -inf in the others."""
    top_k = jnp.minimum(top_k, logits.everything.shape[1])
    is_used = top_k > 0

    def kth_largest(values: Array, low: Array) -> Array:
        def holds(threshold: Array) -> Array:
            return (values >= threshold).sum(axis=1, keepdims=True, dtype=jnp.int32) >= top_k

        return _largest_threshold(low, jnp.where(is_used, logits.peak, low), holds)

    floor = lax.cond(
        (top_k <= largest_near_k).all(),
        lambda: kth_largest(logits.candidates, logits.cut),
        lambda: kth_largest(logits.everything, jnp.full_like(logits.peak, -jnp.inf)),
    )
    return jnp.where(is_used, floor, -jnp.inf)


def _top_p_floor(logits: _Logits, top_p: Array, floor: Array) -> Array:
    """Return the smallest logit of the top-p set of each row with a top-p, -inf in the others.

    It is the smallest set of the largest logits at or above `floor` that holds a share `top_p`
    of their probability.
    """
    is_used = top_p < 1
    target = top_p * logits.weigh(logits.everything, floor).sum(axis=1, keepdims=True)

    def smallest(values: Array, low: Array) -> Array:
        weights = logits.weigh(values, floor)

        def holds(threshold: Array) -> Array:
            return _sum_where(values >= threshold, weights) >= target

        return _largest_threshold(low, jnp.where(is_used, logits.peak, low), holds)

    weights = logits.weigh(logits.candidates, floor)
    is_near = _sum_where(logits.candidates > logits.cut, weights) >= target
    found = lax.cond(
        (is_near | ~is_used).all(),
        lambda: smallest(logits.candidates, logits.cut),
        lambda: smallest(logits.everything, floor),
    )
    return jnp.where(is_used, found, -jnp.inf)


def _sum_where(mask: Array, values: Array) -> Array:
    return jnp.where(mask, values, 0.0).sum(axis=1, keepdims=True)


def _largest_threshold(low: Array, high: Array, holds: Callable[[Array], Array]) -> Array:
    """Return the largest float in `[low, high]` of each row for which `holds`, `low` if none.

    Bisects on the order-preserving integer view of float32, at most 32 rounds, so the result is
    exact. `holds` maps `[num_seqs, 1]` to booleans and must not become true again as it grows.
    """

    def is_open(bounds: tuple[Array, Array]) -> Array:
        return (bounds[0] < bounds[1]).any()

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        is_held = holds(_from_ordered(middle))
        return jnp.where(is_held, middle, low), jnp.where(is_held, high, middle - 1)

    bounds = (_to_ordered(low), _to_ordered(high))
    return _from_ordered(lax.while_loop(is_open, halve, bounds)[0])


def _to_ordered(values: Array) -> Array:
    """Return int32s that compare as the float32 values do."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(ordered: Array) -> Array:
    bits = jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _without_logprobs(logits: Array, token_ids: Array, *, max_logprobs: int) -> SampledTokens:
    num_seqs = logits.shape[0]
    return SampledTokens(
        token_ids=token_ids,
        logprobs=jnp.zeros(num_seqs, jnp.float32),
        ranks=jnp.zeros(num_seqs, jnp.int32),
        top_ids=jnp.zeros((num_seqs, max_logprobs), jnp.int32),
        top_logprobs=jnp.zeros((num_seqs, max_logprobs), jnp.float32),
    )


def _with_logprobs(logits: Array, token_ids: Array, *, max_logprobs: int) -> SampledTokens:
    """Return the tokens with their log probabilities under the unprocessed logits."""
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
