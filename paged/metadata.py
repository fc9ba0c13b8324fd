"""`AttentionMetadata`: where the tokens of a flat batch live in the paged cache."""

from dataclasses import dataclass

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Device arrays that describe a ragged batch to the layers of one cache group; all int32.

    Sequence i owns token rows `query_start_loc[i]:query_start_loc[i + 1]` and attends to its first
    `seq_lens[i]` tokens, new ones included. Rows and sequences past the real ones are padding:
    their slots lie in the null block and `query_start_loc` repeats its last value.

    Attributes:
      block_tables: block ids per sequence, `[num_seqs, max_blocks_per_seq]`.
      seq_lens: context length of each sequence including this step, `[num_seqs]`; 0 for padding.
      query_start_loc: prefix sums of the query lengths, `[num_seqs + 1]`.
      slot_mapping: `block_id * block_size + offset` where each token's K and V go, `[num_tokens]`.
    """

    block_tables: Array  # [num_seqs, max_blocks_per_seq]
    seq_lens: Array  # [num_seqs]
    query_start_loc: Array  # [num_seqs + 1]
    slot_mapping: Array  # [num_tokens]

    @property
    def num_rows(self) -> Array:
        """Token rows that are not padding, `[1]`."""
        return self.query_start_loc[-1:]
