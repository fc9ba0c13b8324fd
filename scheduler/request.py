"""`Request`: the one mutable record of the scheduler, one per sample being generated."""

import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from paged.scheduler.logit_edits import LogitEdits
from paged.scheduler.output import FinishReason
from paged.scheduler.params import SamplingParams


class RequestStatus(Enum):
    """Where a request stands; a finished one also has a `finish_reason`."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sample on its way through the engine.

    There is no prefill phase and no decode phase: every step moves `num_computed_tokens` towards
    `num_tokens`, and a request samples when they meet.

    Attributes:
      request_id: unique among unfinished requests; sample i of a parent has its own.
      prompt_token_ids: ids of the prompt.
      params: sampling parameters, `n` always 1 here.
      max_tokens: most tokens to generate, resolved against `max_model_len`.
      eos_token_id: primary end-of-sequence id, None if it must not stop the request.
      stop_token_ids: further ids that stop it.
      seed: 64-bit seed of the draws, chosen at admission if the caller gave none.
      sampling_row: the sampling parameters as the device reads them, kept after the first use.
      logit_edits: biases and bans, None if there are none.
      cache_salt: isolates the prefix cache; requests share blocks only under an equal salt.
      parent_id, index, num_samples: which sample of which user request this is.
      arrival_time: `time.monotonic()` seconds when the front end received it.
      output_token_ids: generated ids.
      block_ids: the block table, in token order.
      block_hashes: chain hashes of the full blocks known so far.
      num_published_blocks: leading blocks of the table whose content others can find.
      num_computed_tokens: tokens whose keys and values exist or are scheduled.
      num_cached_tokens: prefix-cache hit of the first scheduling; -1 before it.
      num_preemptions: times its blocks were taken away.
      finish_reason, stop_reason: set when it ends.
      queued_time, scheduled_time, first_token_time, last_token_time: monotonic seconds, 0 if not
        yet reached; preemption resets none of them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    eos_token_id: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    sampling_row: np.ndarray | None = None
    logit_edits: LogitEdits | None = None
    cache_salt: str | None = None
    parent_id: str = ""
    index: int = 0
    num_samples: int = 1
    arrival_time: float = field(default_factory=time.monotonic)

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    queued_time: float = 0.0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return known token ids `start:stop` of prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        return [*prompt, *output]
