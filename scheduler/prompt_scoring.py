"""`PendingScores`: which prompt tokens a step scores, and their log probabilities when it is done.

The hidden row of a prompt's token says how likely the next one was. Few requests ask, so the rows
go by way of the host to a program of a fixed size (`paged.models.scoring`), and no step waits for
it but the one that has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paged.scheduler.output import PromptLogprobs, RunnerLogprobs, SchedulerOutput

type Score = Callable[[np.ndarray, np.ndarray], RunnerLogprobs]
"""From hidden rows `[num_rows, hidden_size]` and as many token ids to log probabilities by row."""


class ScoredRows(NamedTuple):
    """Rows of a step that one request has scored.

    Attributes:
      request_id: whose they are.
      first_row: token row of the step.
      position: of the first token that is scored, which is the one after that row.
      token_ids: the tokens that are scored; as many rows.
    """

    request_id: str
    first_row: int
    position: int
    token_ids: tuple[int, ...]


def scored_rows(output: SchedulerOutput) -> list[ScoredRows]:
    """Return what the step's requests want scored, in batch order."""
    found, row = [], 0
    for scheduled in output.scheduled:
        request, start, stop = (
            scheduled.request,
            scheduled.start,
            scheduled.start + scheduled.num_tokens,
        )
        if request.scores_prompt:
            targets = request.prompt_token_ids[start + 1 : stop + 1]
            if targets:
                found.append(ScoredRows(request.request_id, row, start + 1, targets))
        row += scheduled.num_tokens
    return found


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Hidden rows that may still be in the making on the device.

    Attributes:
      rows: what is to be scored, at least one.
      hidden: of all tokens of the step, `[num_tokens, hidden_size]`, on the device.
      score: gives the log probabilities of `num_rows` tokens.
      num_rows: rows that `score` takes.
    """

    rows: Sequence[ScoredRows]
    hidden: Any
    score: Score
    num_rows: int

    def result(self) -> tuple[PromptLogprobs, ...]:
        """Return the log probabilities of each entry of `rows`, waiting for the step."""
        hidden = np.asarray(self.hidden)
        selected = np.concatenate(
            [np.arange(r.first_row, r.first_row + len(r.token_ids)) for r in self.rows]
        )
        token_ids = np.array([i for r in self.rows for i in r.token_ids], np.int32)
        parts = [
            self._score(hidden[selected[start : start + self.num_rows]], token_ids[start:])
            for start in range(0, len(selected), self.num_rows)
        ]
        whole = RunnerLogprobs(*map(np.concatenate, zip(*map(_arrays, parts), strict=True)))
        results, start = [], 0
        for rows in self.rows:
            part = slice(start, start + len(rows.token_ids))
            logprobs = RunnerLogprobs(*(array[part] for array in _arrays(whole)))
            results.append(PromptLogprobs(rows.request_id, rows.position, logprobs))
            start = part.stop
        return tuple(results)

    def _score(self, hidden: np.ndarray, token_ids: np.ndarray) -> RunnerLogprobs:
        """Score at most `num_rows` rows, padded to so many."""
        count = len(hidden)
        padded = np.zeros((self.num_rows, hidden.shape[1]), hidden.dtype)
        padded[:count] = hidden
        targets = np.zeros(self.num_rows, np.int32)
        targets[:count] = token_ids[:count]
        scored = self.score(padded, targets)
        return RunnerLogprobs(*(array[:count] for array in _arrays(scored)))


def _arrays(logprobs: RunnerLogprobs) -> tuple[np.ndarray, ...]:
    return logprobs.sampled, logprobs.ranks, logprobs.top_ids, logprobs.top
