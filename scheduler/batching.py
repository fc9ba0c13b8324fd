"""`build_batch`: messages in, one packed array of a static shape out; pure numpy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged.models.packing import BatchLayout, group_field, in_flight
from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.row_table import RowTable
from paged.scheduler.step_rows import StepRows
from paged.scheduler.wide_edits import WideRowEdits


class Batch(NamedTuple):
    """What a step hands to the device, and what the host must know of it.

    Attributes:
      packed: int32 `[layout.size]`, see `BatchLayout`.
      is_greedy: every sequence that samples takes its likeliest token, and nothing else is wanted.
      wants_logprobs: some sequence wants log probabilities.
      uses_masks: some sequence takes its token from those that a mask allows.
      wants_hidden: some sequence wants its final hidden state.
      pools_prompts: some sequence wants the sum of its tokens' hidden states.
      wide_edits: of the sequences whose logit edits are not in `packed`, as they are too many.
    """

    packed: np.ndarray
    is_greedy: bool
    wants_logprobs: bool
    uses_masks: bool = False
    wants_hidden: bool = False
    pools_prompts: bool = False
    wide_edits: Sequence[WideRowEdits] = ()


class _Sequences(NamedTuple):
    """The scheduled requests by sequence row; arrays are `[num_seqs]`."""

    rows: StepRows
    batch_rows: np.ndarray
    last_positions: np.ndarray  # of the step's last token
    # Token row of that token. Of decodes alone it is a slice, of which NumPy makes no copies.
    last_tokens: np.ndarray | slice


def build_batch(
    output: SchedulerOutput, layout: BatchLayout, table: RowTable, block_size: int
) -> Batch:
    """Return the packed inputs of one step.

    Sequence row i belongs to `output.scheduled[i]`. Padding token rows write to slot 0 of the null
    block; padding sequences have length 0. The array is new at every call: JAX may read a NumPy
    argument without copying it, so a buffer must not change before its step is done.

    Args:
      output: the step; its requests' block tables already cover the scheduled tokens.
      layout: static shapes, large enough for the step.
      table: the requests' arrays by batch row; brought up to date here.
      block_size: tokens per block.
    """
    packed = layout.empty()
    views = layout.views(packed)
    rows = StepRows.of(output.scheduled)
    requests = rows.requests
    num_seqs = len(requests)
    is_decode = output.num_tokens == num_seqs
    if is_decode:
        last_positions = np.array(rows.starts, np.int32)
        stops = last_positions + 1
        token_stops = np.arange(1, num_seqs + 1, dtype=np.int32)
    else:
        num_tokens = np.array(rows.counts, np.int32)
        stops = np.array(rows.starts, np.int32) + num_tokens
        last_positions = stops - 1
        token_stops = num_tokens.cumsum(dtype=np.int32)
    seqs = _Sequences(
        rows=rows,
        batch_rows=np.array([request.batch_row for request in requests]),
        last_positions=last_positions,
        last_tokens=slice(num_seqs) if is_decode else token_stops - 1,
    )
    num_blocks = last_positions // block_size + 1
    table.refresh(requests, seqs.batch_rows, num_blocks)

    views["seq_lens"][:num_seqs] = stops
    views["query_start_loc"][1 : num_seqs + 1] = token_stops
    views["query_start_loc"][num_seqs + 1 :] = output.num_tokens
    views["logits_indices"][:num_seqs] = token_stops - 1
    width = num_blocks.max()
    for group, tables in enumerate(table.block_tables):
        live = tables[seqs.batch_rows, :width]
        views[group_field("block_tables", group)][:num_seqs, :width] = live

    if not is_decode:
        for i in [i for i, count in enumerate(rows.counts) if count > 1]:
            _fill_first_tokens(views, rows[i], int(token_stops[i]) - 1, table, block_size)
    _fill_last_tokens(views, seqs, table, block_size)
    if layout.has_loras:
        views["lora_ids"][: output.num_tokens] = np.repeat(
            table.lora_slots[seqs.batch_rows], rows.counts
        )
    is_greedy, wide_edits = _fill_sampling(views, seqs, table)
    wants_logprobs, uses_masks = bool(views["wants_logprobs"][0]), bool(views["uses_masks"][0])
    # Of a prompt that goes on in a later step the row is of no use, but this is rare and cheap.
    wants_hidden = bool(table.wants_hidden[seqs.batch_rows].any())
    pools_prompts = bool(table.pools_prompt[seqs.batch_rows].any())
    return Batch(
        packed, is_greedy, wants_logprobs, uses_masks, wants_hidden, pools_prompts, wide_edits
    )


def _fill_first_tokens(
    views: dict[str, np.ndarray],
    scheduled: ScheduledRequest,
    last_token: int,
    table: RowTable,
    block_size: int,
) -> None:
    """Write all tokens of a chunk but its last, whose token row is `last_token`."""
    request, start = scheduled.request, scheduled.start
    stop = start + scheduled.num_tokens - 1
    token_rows = slice(last_token - (stop - start), last_token)
    positions = np.arange(start, stop, dtype=np.int32)
    views["token_ids"][token_rows] = request.tokens(start, stop)
    views["positions"][token_rows] = positions
    blocks, offsets = np.divmod(positions, block_size)
    for group, tables in enumerate(table.block_tables):
        slots = tables[request.batch_row, blocks] * block_size + offsets
        views[group_field("slot_mapping", group)][token_rows] = slots


def _fill_last_tokens(
    views: dict[str, np.ndarray],
    seqs: _Sequences,
    table: RowTable,
    block_size: int,
) -> None:
    """Write the last token of every sequence, which of a decode is the only one."""
    views["token_ids"][seqs.last_tokens] = _last_token_ids(seqs)
    views["positions"][seqs.last_tokens] = seqs.last_positions
    blocks, offsets = np.divmod(seqs.last_positions, block_size)
    for group, tables in enumerate(table.block_tables):
        slots = tables[seqs.batch_rows, blocks] * block_size + offsets
        views[group_field("slot_mapping", group)][seqs.last_tokens] = slots


def _last_token_ids(seqs: _Sequences) -> np.ndarray:
    """Return the last token id of every sequence, or what stands for it."""
    rows = seqs.rows
    if all(rows.inputs_in_flight):
        return in_flight(seqs.batch_rows)
    token_ids = [
        in_flight(request.batch_row)
        if is_in_flight
        # Who samples computes the last token that is known.
        else (request.output_token_ids or request.prompt_token_ids)[-1]
        if samples
        else request.tokens(position, position + 1)[0]
        for request, position, samples, is_in_flight in zip(
            rows.requests,
            seqs.last_positions.tolist(),
            rows.samples,
            rows.inputs_in_flight,
            strict=True,
        )
    ]
    return np.array(token_ids, np.int32)


def _fill_sampling(
    views: dict[str, np.ndarray], seqs: _Sequences, table: RowTable
) -> tuple[bool, Sequence[WideRowEdits]]:
    """Write the parameters of the sequences that sample; others stay greedy and keep nothing.

    Returns:
      Whether all of them take their likeliest token, and nothing else is wanted; and the edits that
      are too many to be written.
    """
    samples = seqs.rows.samples
    sampling: np.ndarray | slice = slice(len(samples))
    if not all(samples):
        sampling = np.flatnonzero(samples)
    batch_rows = seqs.batch_rows[sampling]
    views["sampled_rows"][sampling] = batch_rows
    views["sampling"][sampling] = table.sampling[batch_rows]
    views["wants_logprobs"][0] = table.wants_logprobs[batch_rows].any()
    views["uses_masks"][0] = table.is_constrained[batch_rows].any()
    is_greedy = bool(table.is_greedy[batch_rows].all())
    has_edits = table.has_edits[batch_rows]
    if not has_edits.any():
        return is_greedy, ()
    num_edits, wide_edits = 0, []
    for i in np.arange(len(samples))[sampling][has_edits].tolist():
        request = seqs.rows.requests[i]
        assert request.logit_edits is not None
        known = request.output_token_ids
        num_outputs = int(seqs.last_positions[i]) + 1 - request.num_prompt_tokens
        num_in_flight = num_outputs - len(known)
        if (fixed := request.logit_edits.wide) is not None:
            forbidden = request.logit_edits.forbidden_at(known, num_in_flight)
            wide_edits.append(WideRowEdits(i, fixed, forbidden))
            continue
        edits = request.logit_edits.at(known, num_in_flight)
        views["edit_ids"][i, : len(edits)] = [token_id for token_id, _ in edits]
        values = np.array([value for _, value in edits], np.float32)
        views["edit_values"][i, : len(edits)] = values.view(np.int32)
        num_edits += len(edits)
    wide_edits = [edits for edits in wide_edits if not edits.is_empty]
    if wide_edits:
        views["uses_wide_edits"][0] = 1
        views["num_wide_biases"][0] = max(edits.fixed.bias_ids.size for edits in wide_edits)
    return is_greedy and not (num_edits or wide_edits), wide_edits
