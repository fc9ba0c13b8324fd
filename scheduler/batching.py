"""`build_batch`: messages in, one packed array of a static shape out; pure numpy."""

import numpy as np

from paged.models.packing import BatchLayout, sampling_row
from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.request import Request


def build_batch(output: SchedulerOutput, layout: BatchLayout, block_size: int) -> np.ndarray:
    """Return the packed inputs of one step, int32 `[layout.size]`.

    Sequence row i belongs to `output.scheduled[i]`. Padding token rows write to slot 0 of the null
    block; padding sequences have length 0. The array is new at every call: JAX may read a NumPy
    argument without copying it, so a buffer must not change before its step is done.

    Args:
      output: the step; its requests' block tables already cover the scheduled tokens.
      layout: static shapes, large enough for the step.
      block_size: tokens per block.
    """
    packed = layout.empty()
    views = layout.views(packed)
    query_start_loc = views["query_start_loc"]
    row = 0
    for i, scheduled in enumerate(output.scheduled):
        row = _fill_tokens(views, scheduled, row, i, block_size)
        query_start_loc[i + 1] = row
        _fill_sampling(views, scheduled, i)
    query_start_loc[len(output.scheduled) + 1 :] = row
    return packed


def _fill_tokens(
    views: dict[str, np.ndarray], scheduled: ScheduledRequest, row: int, i: int, block_size: int
) -> int:
    """Write the tokens of sequence i from `row` on; return the row after them."""
    request, start = scheduled.request, scheduled.start
    stop, end_row = start + scheduled.num_tokens, row + scheduled.num_tokens
    blocks = np.asarray(request.block_ids, np.int32)
    views["block_tables"][i, : len(blocks)] = blocks
    views["seq_lens"][i] = stop
    views["logits_indices"][i] = end_row - 1
    if scheduled.num_tokens == 1:  # a decode: scalars are several times cheaper than arrays
        views["token_ids"][row] = request.tokens(start, stop)[0]
        views["positions"][row] = start
        slot = request.block_ids[start // block_size] * block_size + start % block_size
        views["slot_mapping"][row] = slot
        return end_row
    positions = np.arange(start, stop, dtype=np.int32)
    views["token_ids"][row:end_row] = request.tokens(start, stop)
    views["positions"][row:end_row] = positions
    slots = blocks[positions // block_size] * block_size + positions % block_size
    views["slot_mapping"][row:end_row] = slots
    return end_row


def _fill_sampling(views: dict[str, np.ndarray], scheduled: ScheduledRequest, i: int) -> None:
    """Write the sampling parameters of sequence i; a row that does not sample stays greedy."""
    request = scheduled.request
    if not scheduled.samples:
        return
    if request.sampling_row is None:
        request.sampling_row = _make_row(request)
    views["sampling"][i] = request.sampling_row
    if request.params.logprobs is not None:
        views["wants_logprobs"][0] = 1
    if request.logit_edits is not None:
        edits = request.logit_edits.at(request.output_token_ids)
        views["edit_ids"][i, : len(edits)] = [token_id for token_id, _ in edits]
        values = np.array([value for _, value in edits], np.float32)
        views["edit_values"][i, : len(edits)] = values.view(np.int32)


def _make_row(request: Request) -> np.ndarray:
    """Return a request's sampling parameters for the device; they hold for all of its steps."""
    params = request.params
    return sampling_row(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        top_k=params.top_k,
        seed=request.seed,
        num_prompt_tokens=request.num_prompt_tokens,
        only_edits=request.logit_edits is not None and request.logit_edits.only_edits,
    )
