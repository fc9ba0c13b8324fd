"""Vectors of prompts: what a step adds to them, and how they come to their requests.

The last token's hidden state is one row of a step. A mean needs those of all tokens of a prompt,
which several steps may compute; each gives their sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.scheduler.output import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class PendingSums:
    """Sums of hidden states that may still be in the making on the device.

    Attributes:
      tokens: by row of the step, which of its tokens are the row's.
      hidden: final hidden states of all tokens of the step, `[num_tokens, hidden_size]`, on the
        device. They come to the host as they are, megabytes for a long prompt: few requests ask,
        and a program that adds them up would be one more to compile for every size of a step.
    """

    tokens: Mapping[int, slice]
    hidden: Any

    def result(self) -> dict[int, np.ndarray]:
        """Return the sums by row, float32 `[hidden_size]`, waiting for the step."""
        hidden = np.asarray(self.hidden)
        return {
            row: hidden[part].astype(np.float32).sum(axis=0) for row, part in self.tokens.items()
        }


def pooled_tokens(output: SchedulerOutput) -> dict[int, slice]:
    """Return the tokens of a step, by row, whose hidden states are to be added up."""
    found, first = {}, 0
    for row, scheduled in enumerate(output.scheduled):
        stop = first + scheduled.num_tokens
        if scheduled.request.params.pools_prompt:
            found[row] = slice(first, stop)
        first = stop
    return found


def keep_pooled(scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
    """Give the requests of a step, before it is accounted for, what it says of their vectors."""
    for index, part in result.hidden_sums.items():
        row = scheduled.scheduled[index]
        request = row.request
        if row.start == 0 or request.hidden_sum is None:  # at first, and after a preemption
            request.hidden_sum = part
        else:
            request.hidden_sum = request.hidden_sum + part
        if row.samples:
            request.pooled = request.hidden_sum / np.float32(request.num_prompt_tokens)
    if result.hidden is not None:
        for row, vector in zip(scheduled.scheduled, result.hidden, strict=True):
            params = row.request.params
            if row.samples and params.is_pooled and not params.pools_prompt:
                row.request.pooled = vector.copy()  # not the whole step's array
