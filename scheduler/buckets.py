"""`BucketTable`: the only place where the static shape of a step is chosen.

XLA compiles one program per shape, so every step is padded up to one of a few shapes, all of them
compiled before the first request (docs/decisions/0005, 0024).
"""

from dataclasses import dataclass

MIN_ROWS = 8
"""XLA's CPU matrix product leaves its vectorised path below 8 rows of bfloat16."""

FEW_SEQS = 8
"""Sequences of a step that one user, or one prefill beside a few decodes, makes."""

_SHORT_PROMPT = 32


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A static shape: `num_tokens` token rows shared by at most `num_seqs` sequences."""

    num_tokens: int
    num_seqs: int


class BucketTable:
    """The buckets of an engine, cheapest first; padding stays below twice a step's tokens.

    Decode buckets have as many tokens as sequences, in powers of two. Mixed buckets are the powers
    of two up to the token budget. They have room for all sequences, which costs a step nothing
    where tokens outnumber them anyway; below that, for a few. The tokens of a step are then chosen
    for as many rows as sample, which `pick_head` says.

    Args:
      max_num_seqs: most sequences in a step.
      max_num_batched_tokens: most tokens in a step; at least `max_num_seqs`.
      min_rows: rows below which the matrix product gets no faster: `MIN_ROWS`, or 1.
      is_fine: a bucket halfway between each two, and all that `min_rows` allows below 8: less
        padding for more programs.

    Attributes:
      buckets: in ascending order.
      greedy_sizes, sample_sizes: numbers of rows that tokens are chosen for, by the two programs.
      resizes: (rows of the bucket, rows of the head) that may differ in a step.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        min_rows: int = MIN_ROWS,
        is_fine: bool = False,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
                f"max_num_seqs={max_num_seqs}."
            )
        decode_sizes = set(_sizes_up_to(max_num_seqs, is_fine))
        self._most_seqs = max(decode_sizes)
        if min_rows < MIN_ROWS:
            # Up to 8 rows cost about the same; one is what a single user's every step has.
            decode_sizes |= {1, 2, 4} if is_fine else {1}
        shapes = {Bucket(size, size) for size in decode_sizes}
        sizes = _sizes_up_to(max_num_batched_tokens, is_fine)
        for size in sizes:
            # Up to 32 tokens a decode bucket does for a short prompt too, or the next size; the
            # budget itself must fit.
            if size > _SHORT_PROMPT or self._most_seqs < size == sizes[-1]:
                shapes.add(Bucket(size, FEW_SEQS if size <= self._most_seqs else self._most_seqs))
        self.buckets: tuple[Bucket, ...] = tuple(sorted(shapes))
        self.greedy_sizes = tuple(sorted(decode_sizes | {FEW_SEQS}))
        # The sampler takes long to compile and little time for few rows.
        self.sample_sizes = tuple(size for size in self.greedy_sizes if size >= FEW_SEQS)
        narrowed = {(self._most_seqs, n) for n in self.sample_sizes if n < self._most_seqs}
        widened = {(n, FEW_SEQS) for n in self.greedy_sizes if n < FEW_SEQS}
        self.resizes: frozenset[tuple[int, int]] = frozenset(narrowed | widened)

    def pick(self, num_tokens: int, num_seqs: int) -> Bucket:
        """Return the cheapest bucket that holds the step.

        Raises:
          ValueError: if none does; the scheduler's limits and the table's then disagree.
        """
        for bucket in self.buckets:
            if bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs:
                return bucket
        raise ValueError(
            f"A step of {num_tokens} tokens and {num_seqs} sequences exceeds the largest bucket "
            f"{self.buckets[-1]}."
        )

    def pick_head(self, bucket: Bucket, num_seqs: int, *, is_greedy: bool) -> int:
        """Return for how many rows a step of `num_seqs` sequences in `bucket` chooses tokens."""
        if bucket.num_seqs < FEW_SEQS:
            return bucket.num_seqs if is_greedy else FEW_SEQS
        if bucket.num_seqs < self._most_seqs:
            return bucket.num_seqs
        return next(size for size in self.sample_sizes if size >= num_seqs)


def _sizes_up_to(limit: int, is_fine: bool) -> list[int]:
    """Return MIN_ROWS, doubled until it reaches `limit`; if fine, by way of the sizes halfway."""
    sizes = [MIN_ROWS]
    while (last := sizes[-1]) < limit:
        is_power = last & (last - 1) == 0
        sizes.append(last * 2 if not is_fine else last * 3 // 2 if is_power else last * 4 // 3)
    return sizes
