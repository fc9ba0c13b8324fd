"""`BucketTable`: the only place where the static shape of a step is chosen.

XLA compiles one program per shape, so every step is padded up to one of a few shapes, all of them
compiled before the first request (docs/decisions/0005).
"""

from dataclasses import dataclass

# XLA's CPU matrix product leaves its vectorised path below 8 rows of bfloat16.
MIN_TOKENS = 8
# Steps with few sequences are common (one user, or one prefill beside a few decodes) and must not
# pay for the vocabulary head of `max_num_seqs` rows.
FEW_SEQS = 8
_SHORT_PROMPT = 32


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A static shape: `num_tokens` token rows shared by at most `num_seqs` sequences."""

    num_tokens: int
    num_seqs: int


class BucketTable:
    """The buckets of an engine, cheapest first.

    Decode buckets have as many tokens as sequences, in powers of two. Mixed buckets go up to the
    token budget: in powers of two with few sequences, where a step's padding is somebody's time
    to first token, and in powers of four with all sequences, which full steps need.

    Args:
      max_num_seqs: most sequences in a step.
      max_num_batched_tokens: most tokens in a step; at least `max_num_seqs`.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
                f"max_num_seqs={max_num_seqs}."
            )
        shapes: set[Bucket] = set()
        for size in _powers_up_to(max_num_seqs):
            shapes.add(Bucket(size, size))
        most_seqs = _powers_up_to(max_num_seqs)[-1]
        sizes = _powers_up_to(max_num_batched_tokens)
        # Up to 32 tokens a decode bucket does for a short prompt too.
        shapes |= {Bucket(size, FEW_SEQS) for size in sizes if size > _SHORT_PROMPT}
        shapes |= {Bucket(size, most_seqs) for size in sizes[::-2] if size > most_seqs}
        self.buckets: tuple[Bucket, ...] = tuple(sorted(shapes))

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


def _powers_up_to(limit: int) -> list[int]:
    """Return MIN_TOKENS, doubled until it reaches `limit`."""
    sizes = [MIN_TOKENS]
    while sizes[-1] < limit:
        sizes.append(sizes[-1] * 2)
    return sizes
