"""`PendingScores`: which tokens a step scores beside its samples, and their log probabilities.

The hidden row of a prompt's token says how likely the next one was, and the row that is sampled
from how likely any token is. Few requests ask, so the rows go by way of the host to a program of a
fixed size (`paged.models.scoring`), and no step waits for it but the one that has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paged.scheduler.output import PromptLogprobs, RunnerLogprobs, SchedulerOutput

type Score = Callable[[np.ndarray, np.ndarray, np.ndarray], RunnerLogprobs]
"""From hidden rows `[num_rows, hidden_size]`, as many token ids and masks `[num_rows, num_words]`
of the tokens that may follow to log probabilities by row."""


class ScoredRows(NamedTuple):
    """Hidden rows of a step, and a token for each whose log probability one request wants.

    Attributes:
      request_id: whose they are.
      token_rows: rows among the tokens of the step.
      token_ids: as many.
      position: of the first token, where they are tokens of a prompt; else -1.
      row: of the request in the step.
    """

    request_id: str
    token_rows: Sequence[int]
    token_ids: Sequence[int]
    position: int
    row: int


def scored_rows(output: SchedulerOutput) -> list[ScoredRows]:
    """Return what the step's requests want scored: prompts, and `logprob_token_ids`."""
    found, first = [], 0
    for row, scheduled in enumerate(output.scheduled):
        request, start = scheduled.request, scheduled.start
        stop = start + scheduled.num_tokens
        if request.scores_prompt and (targets := request.prompt_token_ids[start + 1 : stop + 1]):
            token_rows = range(first, first + len(targets))
            found.append(ScoredRows(request.request_id, token_rows, targets, start + 1, row))
        first += scheduled.num_tokens
        chosen = request.params.logprob_token_ids
        if chosen and scheduled.samples:
            last_rows = [first - 1] * len(chosen)
            found.append(ScoredRows(request.request_id, last_rows, chosen, -1, row))
    return found


class Scores(NamedTuple):
    """Log probabilities of a step beyond those of its samples.

    Attributes:
      prompts: parts of prompts.
      chosen: by the request's row, those of its `logprob_token_ids`, in their order.
    """

    prompts: tuple[PromptLogprobs, ...] = ()
    chosen: Mapping[int, RunnerLogprobs] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Hidden rows that may still be in the making on the device.

    Attributes:
      rows: what is to be scored, at least one.
      hidden: of all tokens of the step, `[num_tokens, hidden_size]`, on the device.
      score: gives the log probabilities of `num_rows` tokens.
      num_rows, num_words: shape of the masks that `score` takes.
      masks: of the step, by request's row, if some request is held to a grammar: what it names is
        scored among the tokens that it may take, as its samples are. Prompts are free.
    """

    rows: Sequence[ScoredRows]
    hidden: Any
    score: Score
    num_rows: int
    num_words: int
    masks: np.ndarray | None = None

    def result(self) -> Scores:
        """Return the log probabilities of `rows`, waiting for the step."""
        hidden = np.asarray(self.hidden)
        token_rows = np.concatenate([np.asarray(rows.token_rows) for rows in self.rows])
        token_ids = np.concatenate([np.asarray(rows.token_ids, np.int32) for rows in self.rows])
        # -1: rows of prompts, which have no mask.
        mask_rows = np.concatenate(
            [
                np.full(len(rows.token_ids), -1 if rows.position >= 0 else rows.row)
                for rows in self.rows
            ]
        )
        parts = [
            self._score(hidden[token_rows[part]], token_ids[part], mask_rows[part])
            for start in range(0, len(token_rows), self.num_rows)
            for part in (slice(start, start + self.num_rows),)
        ]
        whole = [np.concatenate(arrays) for arrays in zip(*map(_arrays, parts), strict=True)]
        prompts: list[PromptLogprobs] = []
        chosen: dict[int, RunnerLogprobs] = {}
        start = 0
        for rows in self.rows:
            part = slice(start, start + len(rows.token_ids))
            logprobs = RunnerLogprobs(*(array[part] for array in whole))
            if rows.position < 0:
                chosen[rows.row] = logprobs
            else:
                prompts.append(PromptLogprobs(rows.request_id, rows.position, logprobs))
            start = part.stop
        return Scores(tuple(prompts), chosen)

    def _score(
        self, hidden: np.ndarray, token_ids: np.ndarray, mask_rows: np.ndarray
    ) -> RunnerLogprobs:
        """Score at most `num_rows` rows, padded to so many."""
        count = len(hidden)
        padded = np.zeros((self.num_rows, hidden.shape[1]), hidden.dtype)
        padded[:count] = hidden
        targets = np.zeros(self.num_rows, np.int32)
        targets[:count] = token_ids
        masks = np.full((self.num_rows, self.num_words), -1, np.int32)
        if self.masks is not None:
            is_masked = mask_rows >= 0
            masks[:count][is_masked] = self.masks[mask_rows[is_masked]]
        scored = self.score(padded, targets, masks)
        return RunnerLogprobs(*(array[:count] for array in _arrays(scored)))


def _arrays(logprobs: RunnerLogprobs) -> tuple[np.ndarray, ...]:
    return logprobs.sampled, logprobs.ranks, logprobs.top_ids, logprobs.top
