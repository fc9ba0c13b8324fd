"""`BatchLayout`: how one int32 array carries every small input of a step to the device.

Each separate host array costs a transfer and tens of microseconds of Python, so the host writes
all of them into one buffer and the compiled step slices it apart again. Both sides derive their
offsets from the same frozen layout, which is also the static shape the step is compiled for.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged.metadata import AttentionMetadata
from paged.models.batch import ForwardBatch, SamplingBatch, WideEdits
from paged.models.sampling import mask_words

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

NO_ROW = np.iinfo(np.int32).max
"""Batch row of a sequence whose sample nobody keeps; past the end of every array of rows."""

NO_TOKEN = np.iinfo(np.int32).max
"""Token id of a bias that is not used; past the end of every vocabulary."""


def in_flight[T: (int, np.ndarray, Array)](batch_row: T) -> T:
    """Return the token id that stands for the sample which the device keeps for a batch row.

    All such ids are negative, and the function is its own inverse.
    """
    return -1 - batch_row


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


_GREEDY = sampling_row()


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Static shapes of one step and the place of each field in its packed array.

    Attributes:
      num_tokens: token rows.
      num_seqs: sequence rows.
      max_blocks_per_seq: width of the block tables.
      max_logit_edits: logit edits per sequence that travel with every step.
      vocab_size: an edit id of this value or more is unused.
      num_groups: cache groups, each with block tables and slots of its own
        (docs/decisions/0017).
      max_logit_biases: biases per sequence of `WideEdits`.
      has_loras: there are LoRA adapters, and `lora_ids` say which token has which.

    Fields, by the name in `views` (int32; floats by their bits): `seq_lens`, `block_tables`,
    `sampling`, `edit_ids`, `edit_values`, `wants_logprobs`, `uses_masks`, `uses_wide_edits`,
    `num_wide_biases`, `query_start_loc`, `logits_indices`, `token_ids`, `positions`, `lora_ids` and
    `slot_mapping` as in `ForwardBatch` and `SamplingBatch`; `block_tables.1`, `slot_mapping.1` and
    so on of the further groups; and `sampled_rows`, the batch row that keeps each sequence's sample
    for a later step, or `NO_ROW`. A token id may also be `in_flight(batch_row)`.
    """

    num_tokens: int
    num_seqs: int
    max_blocks_per_seq: int
    max_logit_edits: int
    vocab_size: int
    num_groups: int = 1
    max_logit_biases: int = 1024
    has_loras: bool = False

    def _row_fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The fields by sequence: they come first, as the sampler reads them alone."""
        yield "seq_lens", (self.num_seqs,)
        yield group_field("block_tables", 0), (self.num_seqs, self.max_blocks_per_seq)
        yield "sampled_rows", (self.num_seqs,)
        yield "sampling", (self.num_seqs, len(SAMPLING_COLUMNS))
        yield "edit_ids", (self.num_seqs, self.max_logit_edits)
        yield "edit_values", (self.num_seqs, self.max_logit_edits)
        yield "wants_logprobs", (1,)
        yield "uses_masks", (1,)
        yield "uses_wide_edits", (1,)
        yield "num_wide_biases", (1,)

    def _fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._row_fields()
        yield "query_start_loc", (self.num_seqs + 1,)
        yield "logits_indices", (self.num_seqs,)
        yield "token_ids", (self.num_tokens,)
        yield "positions", (self.num_tokens,)
        yield group_field("slot_mapping", 0), (self.num_tokens,)
        if self.has_loras:
            yield "lora_ids", (self.num_tokens,)
        for group in range(1, self.num_groups):
            yield group_field("block_tables", group), (self.num_seqs, self.max_blocks_per_seq)
            yield group_field("slot_mapping", group), (self.num_tokens,)

    @property
    def size(self) -> int:
        """Length of the packed array, in int32 words."""
        return sum(math.prod(shape) for _, shape in _places(self).values())

    @property
    def rows_size(self) -> int:
        """Length of its first part, which the sampler reads; independent of `num_tokens`."""
        return sum(math.prod(shape) for _, shape in self._row_fields())

    def view(self, packed: np.ndarray, name: str) -> np.ndarray:
        """Return a writable view of one field of `packed`, int32 `[size]`."""
        place, shape = _places(self)[name]
        return packed[place].reshape(shape)

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Return writable views of the fields of `packed`, int32 `[size]`, by name."""
        return {
            name: packed[place].reshape(shape) for name, (place, shape) in _places(self).items()
        }

    def empty(self) -> np.ndarray:
        """Return a packed array of nothing but padding: greedy rows of length 0.

        Fresh zeros come from the system and cost nothing until they are touched, so little
        else is written here.
        """
        packed = np.zeros(self.size, np.int32)
        self.view(packed, "sampled_rows")[:] = NO_ROW
        self.view(packed, "sampling")[:] = _GREEDY
        self.view(packed, "edit_ids")[:] = self.vocab_size
        return packed

    def empty_wide_edits(self) -> WideEdits:
        """Return NumPy arrays that allow every token and bias none."""
        biases = self.num_seqs, self.max_logit_biases
        return WideEdits(
            allowed=np.full((self.num_seqs, mask_words(self.vocab_size)), -1, np.int32),  # type: ignore[arg-type]
            bias_ids=np.full(biases, NO_TOKEN, np.int32),  # type: ignore[arg-type]
            bias_values=np.zeros(biases, np.float32),  # type: ignore[arg-type]
        )

    def unpack_forward(self, packed: Array) -> ForwardBatch:
        """Slice the traced int32 `[size]` array into the model's batch."""
        fields = self._slice(packed)
        attention = tuple(
            AttentionMetadata(
                block_tables=fields[group_field("block_tables", group)],
                seq_lens=fields["seq_lens"],
                query_start_loc=fields["query_start_loc"],
                slot_mapping=fields[group_field("slot_mapping", group)],
            )
            for group in range(self.num_groups)
        )
        return ForwardBatch(
            token_ids=fields["token_ids"],
            positions=fields["positions"],
            attention=attention,
            logits_indices=fields["logits_indices"],
            lora_ids=fields.get("lora_ids"),
        )

    def resize_rows(self, rows: Array, num_seqs: int) -> Array:
        """Return the traced int32 `[rows_size]` array for `num_seqs` sequences, cut or padded."""
        other = dataclasses.replace(self, num_seqs=num_seqs)
        fields, padding = self._slice(rows), other.views(other.empty())
        parts: list[Array | np.ndarray] = []
        for name, shape in other._row_fields():
            kept = fields[name][: shape[0]]
            parts.append(kept.ravel())
            # Without empty ones: XLA crashes on them in a program of several devices (0.11.2).
            if kept.shape[0] < shape[0]:
                parts.append(padding[name][kept.shape[0] :].ravel())
        return jnp.concatenate(parts)

    def unpack_sampled_rows(self, rows: Array) -> Array:
        """Slice `sampled_rows [num_seqs]` off the traced int32 `[rows_size]` array."""
        return self._slice(rows)["sampled_rows"]

    def unpack_sampling(self, rows: Array) -> tuple[SamplingBatch, Array, Array]:
        """Slice the traced int32 `[rows_size]` array into what the sampler needs.

        Returns:
          The sampler's batch; of the first cache group, which never drops a block,
          `block_tables [num_seqs, max_blocks_per_seq]`; and `seq_lens [num_seqs]`.
        """
        fields = self._slice(rows)
        column = {name: fields["sampling"][:, i] for i, name in enumerate(SAMPLING_COLUMNS)}
        for name in _FLOAT_COLUMNS:
            column[name] = _bits_to_float(column[name])
        seeds = jnp.stack([column.pop("seed_high"), column.pop("seed_low")], axis=1)
        sampling = SamplingBatch(
            seeds=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
            edit_ids=fields["edit_ids"],
            edit_values=_bits_to_float(fields["edit_values"]),
            wants_logprobs=fields["wants_logprobs"],
            uses_masks=fields["uses_masks"],
            uses_wide_edits=fields["uses_wide_edits"],
            num_wide_biases=fields["num_wide_biases"],
            **column,
        )
        return sampling, fields["block_tables"], fields["seq_lens"]

    def _slice(self, packed: Array) -> dict[str, Array]:
        """Slice a traced packed array, or its first part, into fields."""
        return {
            name: jnp.reshape(packed[place], shape)
            for name, (place, shape) in _places(self).items()
            if place.stop <= packed.shape[0]
        }


def group_field(name: str, group: int) -> str:
    """Return the name of a cache group's own `block_tables` or `slot_mapping`."""
    return name if group == 0 else f"{name}.{group}"


@functools.lru_cache(maxsize=256)
def _places(layout: BatchLayout) -> Mapping[str, tuple[slice, tuple[int, ...]]]:
    """Return where each field lies in the packed array, and its shape."""
    places, offset = {}, 0
    for name, shape in layout._fields():
        size = math.prod(shape)
        places[name] = slice(offset, offset + size), shape
        offset += size
    return places


def _bits_to_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
