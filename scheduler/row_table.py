"""`RowTable`: what the host knows of each running request, as arrays by batch row.

A step of 256 decodes must not loop over 256 block tables. A request keeps its batch row from its
admission until it ends or is preempted, so its block table and its sampling parameters are copied
once, extended when the table grows, and gathered for each step by one indexing operation a field.
"""

from collections.abc import Sequence

import numpy as np

from paged.models.packing import SAMPLING_COLUMNS, sampling_row
from paged.scheduler.request import Request


class RowTable:
    """Arrays by batch row (mutable); a row holds the request that was last refreshed there.

    Entries of a block table past its end are stale or 0, and so are those that have left a sliding
    window since they were copied: nothing reads either.

    Args:
      max_num_seqs: batch rows.
      max_blocks_per_seq: width of the block tables.
      num_groups: cache groups, each with a block table per request.

    Attributes:
      block_tables: int32 `[num_groups, max_num_seqs, max_blocks_per_seq]`.
      sampling: int32 `[max_num_seqs, len(SAMPLING_COLUMNS)]`, see `sampling_row`.
      wants_logprobs, wants_hidden, pools_prompt, has_edits, is_constrained: bool `[max_num_seqs]`.
      lora_slots: int32 `[max_num_seqs]`, where its adapter lies on the device.
      is_greedy: bool `[max_num_seqs]`, whether nothing but the logits and this step's edits decides
        which token is taken, and only the token is wanted.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, num_groups: int = 1) -> None:
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), np.int32)
        self.sampling = np.zeros((max_num_seqs, len(SAMPLING_COLUMNS)), np.int32)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.wants_hidden = np.zeros(max_num_seqs, np.bool_)
        self.pools_prompt = np.zeros(max_num_seqs, np.bool_)
        self.has_edits = np.zeros(max_num_seqs, np.bool_)
        self.is_constrained = np.zeros(max_num_seqs, np.bool_)
        self.is_greedy = np.zeros(max_num_seqs, np.bool_)
        self.lora_slots = np.zeros(max_num_seqs, np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)  # entries copied, in every group
        self._versions = np.full(max_num_seqs, -1, np.int64)

    def refresh(
        self, requests: Sequence[Request], rows: np.ndarray, num_blocks: np.ndarray
    ) -> None:
        """Bring the rows of the requests of a step up to date.

        Args:
          requests: the requests.
          rows: the batch row of each.
          num_blocks: blocks of each that the step reads or writes, per group.
        """
        versions = np.array([request.table_version for request in requests], np.int64)
        changed = versions != self._versions[rows]
        if changed.any():
            for i in np.flatnonzero(changed).tolist():
                self._set(rows[i], requests[i])
        grown = num_blocks > self._num_blocks[rows]
        if grown.any():
            for i in np.flatnonzero(grown).tolist():
                self._append_blocks(rows[i], requests[i])

    def _set(self, row: int, request: Request) -> None:
        self._versions[row] = request.table_version
        self._num_blocks[row] = 0
        if request.sampling_row is None:
            request.sampling_row = _make_sampling_row(request)
        self.sampling[row] = request.sampling_row
        self.wants_logprobs[row] = request.params.logprobs is not None
        self.wants_hidden[row] = request.params.is_pooled and not request.params.pools_prompt
        self.pools_prompt[row] = request.params.pools_prompt
        self.has_edits[row] = request.logit_edits is not None
        self.is_constrained[row] = request.constraint is not None
        self.is_greedy[row] = _is_greedy(request)
        self.lora_slots[row] = request.lora_slot
        self._append_blocks(row, request)

    def _append_blocks(self, row: int, request: Request) -> None:
        start = int(self._num_blocks[row])
        for group, table in enumerate(request.block_tables):
            if len(table) == start + 1:  # a decode's: setting one entry is faster than a slice
                self.block_tables[group, row, start] = table[start]
            else:
                self.block_tables[group, row, start : len(table)] = table[start:]
        self._num_blocks[row] = min(map(len, request.block_tables))


def _is_greedy(request: Request) -> bool:
    params, edits = request.params, request.logit_edits
    return (
        params.temperature <= 0
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and params.logprobs is None
        and not (edits and edits.only_edits and edits.wide is None)
        and request.constraint is None
    )


def _make_sampling_row(request: Request) -> np.ndarray:
    """Return a request's sampling parameters for the device; they hold for all of its steps."""
    params, edits = request.params, request.logit_edits
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
        only_edits=edits is not None and edits.only_edits and edits.wide is None,
    )
