"""`BatchLayout`: how one int32 array carries every small input of a step to the device.

Each separate host array costs a transfer and tens of microseconds of Python, so the host writes
all of them into one buffer and the compiled step slices it apart again. Both sides derive their
offsets from the same frozen layout, which is also the static shape the step is compiled for.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged.metadata import AttentionMetadata
from paged.models.batch import ForwardBatch, SamplingBatch

# Columns of the per-row sampling matrix; the host prepares a request's row once, at admission.
_FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INT_COLUMNS = ("top_k", "seed_high", "seed_low", "num_prompt_tokens", "only_edits")
SAMPLING_COLUMNS = (*_FLOAT_COLUMNS, *_INT_COLUMNS)


def sampling_row(
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    num_prompt_tokens: int = 0,
    only_edits: bool = False,
) -> np.ndarray:
    """Return one request's sampling parameters, int32 `[len(SAMPLING_COLUMNS)]`.

    Floats are stored by their bits and the 64-bit `seed` as two words; the defaults are greedy.
    """
    floats = np.array(
        [temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty],
        np.float32,
    )
    words = np.array([seed % 2**64 >> 32, seed % 2**32], np.uint32)
    ints = np.array([num_prompt_tokens, int(only_edits)], np.int32)
    return np.concatenate(
        [floats.view(np.int32), np.array([top_k], np.int32), words.view(np.int32), ints]
    )


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Static shapes of one step and the place of each field in its packed array.

    Attributes:
      num_tokens: token rows.
      num_seqs: sequence rows.
      max_blocks_per_seq: width of the block tables.
      max_logit_edits: logit edits per sequence.
      vocab_size: an edit id of this value or more is unused.
    """

    num_tokens: int
    num_seqs: int
    max_blocks_per_seq: int
    max_logit_edits: int
    vocab_size: int

    def _row_fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The fields by sequence: they come first, as the sampler reads them alone."""
        yield "seq_lens", (self.num_seqs,)
        yield "block_tables", (self.num_seqs, self.max_blocks_per_seq)
        yield "sampling", (self.num_seqs, len(SAMPLING_COLUMNS))
        yield "edit_ids", (self.num_seqs, self.max_logit_edits)
        yield "edit_values", (self.num_seqs, self.max_logit_edits)
        yield "wants_logprobs", (1,)

    def _fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._row_fields()
        yield "query_start_loc", (self.num_seqs + 1,)
        yield "logits_indices", (self.num_seqs,)
        yield "token_ids", (self.num_tokens,)
        yield "positions", (self.num_tokens,)
        yield "slot_mapping", (self.num_tokens,)

    @property
    def size(self) -> int:
        """Length of the packed array, in int32 words."""
        return sum(math.prod(shape) for _, shape in self._fields())

    @property
    def rows_size(self) -> int:
        """Length of its first part, which the sampler reads; independent of `num_tokens`."""
        return sum(math.prod(shape) for _, shape in self._row_fields())

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Return writable views of the fields of `packed`, int32 `[size]`, by name."""
        return _slice(self._fields(), packed, lambda field, shape: field.reshape(shape))

    def empty(self) -> np.ndarray:
        """Return a packed array of nothing but padding: greedy rows of length 0."""
        packed = np.zeros(self.size, np.int32)
        views = self.views(packed)
        views["sampling"][:] = sampling_row()
        views["edit_ids"][:] = self.vocab_size
        return packed

    def unpack_forward(self, packed: Array) -> ForwardBatch:
        """Slice the traced int32 `[size]` array into the model's batch."""
        fields = _slice(self._fields(), packed, jnp.reshape)
        attention = AttentionMetadata(
            block_tables=fields["block_tables"],
            seq_lens=fields["seq_lens"],
            query_start_loc=fields["query_start_loc"],
            slot_mapping=fields["slot_mapping"],
        )
        return ForwardBatch(
            token_ids=fields["token_ids"],
            positions=fields["positions"],
            attention=attention,
            logits_indices=fields["logits_indices"],
        )

    def unpack_sampling(self, rows: Array) -> tuple[SamplingBatch, Array, Array]:
        """Slice the traced int32 `[rows_size]` array into what the sampler needs.

        Returns:
          The sampler's batch, `block_tables [num_seqs, max_blocks_per_seq]` and
          `seq_lens [num_seqs]`.
        """
        fields = _slice(self._row_fields(), rows, jnp.reshape)
        column = {name: fields["sampling"][:, i] for i, name in enumerate(SAMPLING_COLUMNS)}
        for name in _FLOAT_COLUMNS:
            column[name] = _bits_to_float(column[name])
        seeds = jnp.stack([column.pop("seed_high"), column.pop("seed_low")], axis=1)
        sampling = SamplingBatch(
            seeds=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
            edit_ids=fields["edit_ids"],
            edit_values=_bits_to_float(fields["edit_values"]),
            wants_logprobs=fields["wants_logprobs"],
            **column,
        )
        return sampling, fields["block_tables"], fields["seq_lens"]


def _bits_to_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _slice[T: (np.ndarray, Array)](
    layout: Iterator[tuple[str, tuple[int, ...]]],
    packed: T,
    reshape: Callable[[T, tuple[int, ...]], T],
) -> dict[str, T]:
    fields: dict[str, T] = {}
    offset = 0
    for name, shape in layout:
        size = math.prod(shape)
        fields[name] = reshape(packed[offset : offset + size], shape)
        offset += size
    return fields
