"""Dense float64 attention in NumPy, and ragged batches to compare a backend against it.

A batch is poisoned: every slot that a correct kernel must not use holds NaN or inf, and so do
the query rows of padding. One slip of a mask and the comparison fails.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

Numbers = np.ndarray

# Unit roundoff: the largest relative error of one rounding.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static side of a batch: what one compiled program is made for."""

    num_tokens: int
    num_seqs: int
    max_blocks_per_seq: int
    block_size: int
    num_kv_heads: int
    queries_per_kv: int
    head_dim: int
    dtype: str = "float32"
    sliding_window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    cache_dtype: str | None = None  # None: dtype
    has_kv_scales: bool = False
    has_sinks: bool = False
    num_planes: int = 2

    @property
    def max_context(self) -> int:
        return self.max_blocks_per_seq * self.block_size

    @property
    def options(self) -> dict[str, float | int | None]:
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        }


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of a call; Hypothesis prints the small ones of a batch that fails."""

    shape: Shape
    q: Numbers = dataclasses.field(repr=False)  # [num_tokens, num_q_heads, head_dim]
    # [num_blocks, planes, num_kv_heads, block_size, head_dim]
    kv_cache: Numbers = dataclasses.field(repr=False)
    block_tables: Numbers = dataclasses.field(repr=False)  # [num_seqs, max_blocks_per_seq]
    seq_lens: Numbers  # [num_seqs]
    query_start_loc: Numbers  # [num_seqs + 1]
    kv_scales: Numbers | None = None  # [planes, num_kv_heads]
    sinks: Numbers | None = None  # [num_q_heads]

    @property
    def extras(self) -> dict[str, Numbers]:
        extras = {"kv_scales": self.kv_scales, "sinks": self.sinks}
        return {name: array for name, array in extras.items() if array is not None}

    @property
    def arrays(self) -> tuple[Numbers, ...]:
        return (self.q, self.kv_cache, self.block_tables, self.seq_lens, self.query_start_loc)


def make_batch(
    shape: Shape, seqs: Sequence[tuple[int, int]], seed: int, shared_blocks: int = 0
) -> Batch:
    """Return a batch of `(context length, query length)` sequences with shuffled block ids.

    The first `shared_blocks` blocks of every sequence that is long enough are the same blocks.
    With a sliding window, blocks that no query sees any more are replaced by the null block.
    """
    rng = np.random.default_rng(seed)
    block_size = shape.block_size
    # As many for every batch of a shape, or each would be compiled anew.
    num_blocks = 8 + shape.num_seqs * shape.max_blocks_per_seq
    assert shared_blocks < 8
    poison = rng.choice([np.nan, np.inf, -np.inf], (num_blocks, shape.num_planes, 1, block_size, 1))
    kv_shape = (
        num_blocks, shape.num_planes, shape.num_kv_heads, block_size, shape.head_dim
    )  # fmt: skip
    kv_cache = np.broadcast_to(poison, kv_shape).copy()
    values = rng.standard_normal(kv_shape)
    free = [int(block) for block in rng.permutation(np.arange(1, num_blocks))]
    shared = [free.pop() for _ in range(shared_blocks)] if seqs else []

    block_tables = np.zeros((shape.num_seqs, shape.max_blocks_per_seq), np.int32)
    for i, (context, query) in enumerate(seqs):
        blocks = -(-context // block_size)
        first_seen = 0
        if shape.sliding_window is not None:
            first_seen = max(0, context - query - shape.sliding_window + 1)
        for j in range(blocks):
            if (j + 1) * block_size <= first_seen:
                continue
            is_shared = j < shared_blocks and (j + 1) * block_size <= context - query
            block = shared[j] if is_shared else free.pop()
            start, stop = max(0, first_seen - j * block_size), context - j * block_size
            kv_cache[block, :, :, start:stop] = values[block, :, :, start:stop]
            block_tables[i, j] = block
        # Past the context anything may be listed.
        block_tables[i, blocks:] = rng.integers(0, num_blocks, shape.max_blocks_per_seq - blocks)

    seq_lens = np.zeros(shape.num_seqs, np.int32)
    query_start_loc = np.zeros(shape.num_seqs + 1, np.int32)
    seq_lens[: len(seqs)] = [context for context, _ in seqs]
    query_start_loc[1 : len(seqs) + 1] = np.cumsum([query for _, query in seqs])
    query_start_loc[len(seqs) + 1 :] = query_start_loc[len(seqs)]
    num_q_heads = shape.num_kv_heads * shape.queries_per_kv
    q = rng.standard_normal((shape.num_tokens, num_q_heads, shape.head_dim))
    q[query_start_loc[-1] :] = np.nan
    scales = rng.uniform(0.5, 2.0, (shape.num_planes, shape.num_kv_heads)).astype(np.float32)
    # Some far below the other logits, some far above, where they take all the weight.
    sinks = rng.uniform(-8.0, 12.0, num_q_heads).astype(np.float32)
    return Batch(
        shape,
        q.astype(jnp.dtype(shape.dtype)),
        kv_cache.astype(jnp.dtype(shape.cache_dtype or shape.dtype)),
        block_tables,
        seq_lens,
        query_start_loc,
        kv_scales=scales if shape.has_kv_scales else None,
        sinks=sinks if shape.has_sinks else None,
    )


def dense_attention(batch: Batch) -> Numbers:
    """Return the float64 result that the op documents, `[num_tokens, num_q_heads, head_dim]`."""
    shape = batch.shape
    q = batch.q.astype(np.float64)
    output = np.zeros_like(q)
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    for i, context in enumerate(batch.seq_lens):
        start, stop = batch.query_start_loc[i : i + 2]
        if context == 0 or start == stop:
            continue
        positions = np.arange(context)
        blocks = batch.block_tables[i, positions // shape.block_size]
        slots = batch.kv_cache[blocks, :, :, positions % shape.block_size].astype(np.float64)
        if batch.kv_scales is not None:
            slots *= batch.kv_scales[:, :, None]
        slots = np.repeat(slots, shape.queries_per_kv, axis=2)  # [context, planes, num_q_heads, H]
        query_positions = context - (stop - start) + np.arange(stop - start)
        for row, position in zip(range(start, stop), query_positions, strict=True):
            window = shape.sliding_window or context
            seen = slice(max(0, position - window + 1), position + 1)
            keys, values = slots[seen, 0], slots[seen, -1]
            logits = np.einsum("NH,SNH->NS", q[row], keys) * scale
            if shape.soft_cap is not None:
                logits = shape.soft_cap * np.tanh(logits / shape.soft_cap)
            if batch.sinks is not None:
                logits = np.concatenate([logits, batch.sinks.astype(np.float64)[:, None]], axis=1)
                values = np.concatenate([values, np.zeros_like(values[:1])])
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            output[row] = np.einsum("NS,SNH->NH", weights, values)
    return output


def tolerance(batch: Batch) -> float:
    """Return how far a backend may be off, in absolute terms.

    An output is a weighted mean of values, so it is at most the largest value in size. A backend
    may round the weights and the output to the array's dtype, which moves it by a unit roundoff
    of that size each. What is left is float32 arithmetic: logits of size |q||k| scale, which
    exp() turns from absolute into relative errors of the weights; 64 roundoffs cover it.
    """
    cache = batch.kv_cache.astype(np.float64)
    largest = float(np.max(np.abs(cache[np.isfinite(cache)]), initial=0.0))
    if batch.kv_scales is not None:
        largest *= float(batch.kv_scales.max())
    unit = UNIT_ROUNDOFF[batch.shape.dtype]
    return largest * (2 * unit + 64 * UNIT_ROUNDOFF["float32"])


def assert_matches(output: Numbers, batch: Batch) -> None:
    """Fail unless `output` is the dense attention of the batch, and exact zeros in padding."""
    output = np.asarray(output).astype(np.float64)
    num_rows = int(batch.query_start_loc[-1])
    assert np.isfinite(output).all(), f"rows with NaN or inf: {_bad_rows(~np.isfinite(output))}"
    assert not output[num_rows:].any(), f"padding rows not zero: {_bad_rows(output != 0)}"
    error = np.abs(output - dense_attention(batch))
    limit = tolerance(batch)
    assert error.max(initial=0.0) <= limit, (
        f"max error {error.max():.3g}, mean {error.mean():.3g}, allowed {limit:.3g}; "
        f"rows {_bad_rows(error > limit)}, seq_lens {batch.seq_lens.tolist()}, "
        f"query_start_loc {batch.query_start_loc.tolist()}"
    )


def _bad_rows(is_bad: Numbers) -> list[int]:
    return np.flatnonzero(is_bad.reshape(len(is_bad), -1).any(axis=1)).tolist()[:20]
