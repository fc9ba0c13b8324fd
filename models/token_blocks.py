"""The vocabulary as blocks of 64 tokens: the largest logit of a row, without an argmax.

A block's maximum or mass says whether its tokens matter, so what follows the first pass over the
logits looks at few of them.
"""

import jax.numpy as jnp
from jax import Array

BLOCK = 64
"""Tokens per block."""


def take_best(logits: Array) -> Array:
    """Return the first largest logit of each row, int32 `[num_seqs]`.

    Args:
      logits: float32 `[num_seqs, vocab_size]`; a row of nothing but -inf, or with NaN, gives some
        token of the vocabulary.
    """
    blocks = in_blocks(logits)
    block = first_best(blocks.max(axis=2))
    best = block * BLOCK + first_best(take_blocks(blocks, block[:, None]))
    # Without a best one, the last place was taken, which may be padding of the last block.
    return jnp.minimum(best, logits.shape[1] - 1)


def in_blocks(logits: Array) -> Array:
    """Return the logits as `[num_seqs, num_blocks, 64]`, the last block filled with -inf."""
    missing = -logits.shape[1] % BLOCK
    padded = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return padded.reshape(logits.shape[0], -1, BLOCK)


def take_blocks(blocks: Array, index: Array) -> Array:
    """Return the blocks `index` `[num_seqs, n]` of each row side by side, `[num_seqs, n * 64]`."""
    num_seqs, num_blocks, size = blocks.shape
    # One row per block: XLA:CPU gathers rows of a matrix twice as fast as slices of a higher rank.
    rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None] * num_blocks + index
    matrix = blocks.reshape(num_seqs * num_blocks, size)
    taken = matrix.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return taken.reshape(num_seqs, -1)


def first_best(values: Array) -> Array:
    """Return the first index of the largest value of each row, int32 `[num_seqs]`.

    XLA's own argmax is a scalar loop on CPUs, several times slower than these three reductions.
    """
    index = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    is_best = values == values.max(axis=1, keepdims=True)
    return jnp.where(is_best, index, values.shape[1] - 1).min(axis=1)
