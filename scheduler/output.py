"""The messages between scheduler, runner and front ends, which nobody changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paged.scheduler.block_residency import BlockResidency
from paged.scheduler.work import Work

if TYPE_CHECKING:
    from paged.scheduler.lora_store import Adapter
    from paged.scheduler.request import Request


class FinishReason(Enum):
    """Why a sample ended; the value is what the API reports."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    Attributes:
      request: the request; its block tables already cover the scheduled tokens.
      start: first token position computed in this step.
      num_tokens: tokens computed in this step.
      samples: whether the step reaches the request's last token, so that one is sampled.
      input_in_flight: the last of the tokens is the sample of an earlier step that the device has
        not returned yet; it has to be taken from there.
    """

    request: "Request"
    start: int
    num_tokens: int
    samples: bool
    input_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes.

    What has to happen to whole blocks comes before the step, in this order: `restores` fill blocks
    that it reads, `saves` read blocks that it may overwrite (restored ones among them, if they
    were given up at once), `block_copies` give a request its own copy of a block that it shared.

    Attributes:
      scheduled: in batch order; the scheduler's are columns, `StepRows`.
      num_tokens: sum of the scheduled tokens.
      preempted: requests that lost their blocks in this step.
      restores: staged contents from lower tiers, opaque to the scheduler.
      saves: (block id, key) of evicted blocks that a lower tier keeps.
      block_copies: (source, destination) block ids; all are read before any is written.
      lora_loads: (slot, adapter) of adapters that have to be on the device before the step.
      scores_prompts: some request wants the log probabilities of its prompt's tokens.
    """

    scheduled: Sequence[ScheduledRequest]
    num_tokens: int
    preempted: tuple["Request", ...] = ()
    restores: tuple[object, ...] = ()
    saves: tuple[tuple[int, bytes], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    lora_loads: "tuple[tuple[int, Adapter], ...]" = ()
    scores_prompts: bool = False


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What the device returned, row i for `SchedulerOutput.scheduled[i]`.

    Attributes:
      token_ids: int32 `[num_scheduled]`; meaningful where the row samples.
      logprobs: None unless a row asked for log probabilities.
      hidden: final hidden states where rows end, float32 `[num_scheduled, hidden_size]`; None
        unless a row that samples wants its own (`SamplingParams.is_pooled`).
      hidden_sums: by row, the sums of its tokens' final hidden states, float32 `[hidden_size]`, for
        `SamplingParams.pools_prompt`.
      prompt_logprobs: of requests that asked for those of their prompt's tokens.
      chosen_logprobs: by row, those of the request's `logprob_token_ids`, in their order.
    """

    token_ids: np.ndarray
    logprobs: "RunnerLogprobs | None" = None
    hidden: np.ndarray | None = None
    prompt_logprobs: "tuple[PromptLogprobs, ...]" = ()
    chosen_logprobs: "Mapping[int, RunnerLogprobs]" = field(default_factory=dict)
    hidden_sums: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerLogprobs:
    """Log probabilities of a step, rows as in `ModelRunnerOutput`.

    Attributes:
      sampled: float32 `[num_scheduled]`.
      ranks: int32 `[num_scheduled]`.
      top_ids: int32 `[num_scheduled, max_logprobs]`.
      top: float32 `[num_scheduled, max_logprobs]`.
    """

    sampled: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a part of a prompt.

    Attributes:
      request_id: whose prompt it is.
      start: position of the first token; never 0, as nothing comes before that.
      logprobs: row i is of the token at `start + i`.
    """

    request_id: str
    start: int
    logprobs: RunnerLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one candidate token.

    Attributes:
      logprob: natural logarithm of the probability.
      rank: number of tokens at least as likely (best: 1).
      decoded_token: the token as text; U+FFFD stands for bytes that are no character alone.
    """

    logprob: float
    rank: int
    decoded_token: str


type PositionLogprobs = Mapping[int, Logprob]
"""Token id -> `Logprob` for one position; the sampled token comes first in iteration order."""


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request; a delta from the engine, the whole from `LLM`.

    Not frozen, as `RequestOutput` is not: both are made for every streamed token, and a frozen
    dataclass takes four times as long to make.

    Attributes:
      index: which of the `n` samples.
      text: decoded text (new text in a delta).
      token_ids: generated ids (new ids in a delta).
      logprobs: per token, if asked for.
      finish_reason: "stop", "length", "abort", "error", "repetition", or None while running.
      stop_reason: the stop string or stop token id that ended it, if any.
      cumulative_logprob: sum of the sampled tokens' log probabilities, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """Outputs of one request: deltas of some samples from the engine, all of them from `LLM`.

    Attributes:
      request_id: as given.
      prompt: the prompt's text, where it was given as text.
      prompt_token_ids: ids of the prompt.
      outputs: one per sample that advanced (engine), or one per sample in order (`LLM`).
      finished: all samples of the request have ended.
      num_cached_tokens: prompt tokens taken from the prefix cache at first scheduling, by the
        sample that was the first to run: the later ones of n find what this one has computed.
      pooled: float32 `[hidden_size]`, with the last output of a request for a vector.
      prompt_logprobs: one entry per prompt token, None for the first; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    pooled: np.ndarray | None = None
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None


class Moments(NamedTuple):
    """When a sample reached each point of its way, monotonic seconds; 0 if it never did.

    Preemption resets none of them.

    Attributes:
      arrival: the front end received the request.
      queued, scheduled: it was put into the queue, and first taken out of it.
      first_token, last_token: its first and last token were known.
      end: it ended.
    """

    arrival: float = 0.0
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """Times and sizes of a finished sample, for histograms and traces; times in seconds.

    Attributes:
      finish_reason: "stop", "length", "abort", "error" or "repetition".
      num_prompt_tokens, num_generation_tokens: lengths.
      max_tokens: the request's limit, None if it had none.
      n: samples of the request it belongs to.
      e2e_seconds: arrival to end.
      queue_seconds: queued to first scheduled.
      prefill_seconds: first scheduled to first token.
      decode_seconds: first token to last token.
      inference_seconds: first scheduled to last token.
      num_preemptions: times it lost its blocks.
      num_cached_tokens: prompt tokens that it did not have to compute.
      request_id, index: of the user request that it is a sample of, and which.
      moments: from which the times above follow.
      work: as in `Request`; grows until the step that has ended the sample is over.
    """

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int | None
    n: int
    e2e_seconds: float
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    inference_seconds: float
    num_preemptions: int
    num_cached_tokens: int = 0
    request_id: str = ""
    index: int = 0
    moments: Moments = field(default_factory=Moments)
    work: Mapping[str, Work] = field(default_factory=dict)


class DeviceWork(NamedTuple):
    """What one device does in a step.

    Attributes:
      flops: additions and multiplications, of real tokens only: padding is no work.
      read_bytes: weights, and keys and values of the contexts.
      write_bytes: new keys and values.
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did: the only source of every metric above the scheduler.

    Attributes:
      num_running, num_waiting: requests after the step.
      num_deferred: of those that wait, how many wait for a lower tier, or for a place for
        their adapter, and not for room.
      kv_cache_usage: share of blocks that are referenced, 0 to 1.
      num_tokens: tokens computed in this step.
      num_prompt_tokens: prompt tokens of requests that finished their first prefill in this step.
      num_cached_prompt_tokens: how many of those came from the prefix cache.
      restored_prompt_tokens: how many of these came from the tiers below, by medium.
      num_generation_tokens: tokens sampled in this step.
      prefix_queries, prefix_hits: tokens looked up and found on the device, at first admission
        only.
      prefix_evicted: tokens of those not found that were cached before and evicted.
      external_prefix_queries: tokens looked up in the tiers below, 0 if there are none.
      external_prefix_hits: tokens found there, by medium ("host", "disk").
      num_discarded_tokens: computed tokens thrown away by preemptions in this step.
      num_preempted: requests preempted in this step.
      ttft_seconds: time to first token of requests that got it in this step.
      itl_seconds: gaps between a request's previous token and this one.
      finished: requests that ended.
      running_loras, waiting_loras: names of the adapters of requests after the step, sorted.
      step_seconds: wall time of the step.
      block_residencies: stays of followed KV blocks that ended; none unless some are followed.
      work: what each device did, by estimate; nothing unless that is estimated.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_deferred: int = 0
    step_tokens: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    restored_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    num_generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evicted: int = 0
    external_prefix_queries: int = 0
    external_prefix_hits: Mapping[str, int] = field(default_factory=dict)
    num_discarded_tokens: int = 0
    num_preempted: int = 0
    ttft_seconds: tuple[float, ...] = ()
    itl_seconds: tuple[float, ...] = ()
    finished: tuple[FinishedRequestStats, ...] = field(default_factory=tuple)
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()
    step_seconds: float = 0.0
    block_residencies: tuple[BlockResidency, ...] = ()
    work: DeviceWork = field(default_factory=DeviceWork)
