"""`Request`: the one mutable record of the scheduler, one per sample being generated."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paged.scheduler.logit_edits import LogitEdits
from paged.scheduler.lora_store import Adapter
from paged.scheduler.output import FinishReason
from paged.scheduler.params import SamplingParams
from paged.scheduler.work import Work

if TYPE_CHECKING:
    from paged.scheduler.structured.grammar_constraint import GrammarConstraint


class RequestStatus(Enum):
    """Where a request stands; a finished one also has a `finish_reason`."""

    WAITING = "waiting"
    LOADING = "loading"  # waits for its prefix from a lower tier, with its blocks in hand
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class CacheMode(Enum):
    """What a request leaves behind in the prefix cache; every request reads from it."""

    DEFAULT = "default"
    NO_STORE = "no_store"  # nothing: a one-shot document that must not displace a chat
    PIN = "pin"  # its prompt, protected from eviction for a while


class MultimodalItem(NamedTuple):
    """An image or the like: its tokens look alike, so its hash must enter the block hashes.

    Attributes:
      content_hash: of the item's bytes.
      offset: first token position that it fills.
      length: tokens that it fills.
    """

    content_hash: str
    offset: int
    length: int


@dataclass(slots=True, eq=False)
class Request:
    """One sample on its way through the engine.

    There is no prefill phase and no decode phase: every step moves `num_computed_tokens` towards
    `num_tokens`, and a request samples when they meet.

    Attributes:
      request_id: unique among unfinished requests; sample i of a parent has its own.
      prompt_token_ids: ids of the prompt, which are `num_prompt_tokens`.
      params: sampling parameters, `n` always 1 here.
      max_tokens: most tokens to generate, resolved against `max_model_len`.
      eos_token_id: primary end-of-sequence id, None if it must not stop the request.
      stop_token_ids: further ids that stop it.
      end_token_ids: all ids that stop it.
      seed: 64-bit seed of the draws, chosen at admission if the caller gave none.
      sampling_row: the sampling parameters as the device reads them, kept after the first use.
      logit_edits: biases and bans, None if there are none.
      constraint: what its next token may be, None if it may be any.
      needs_known_tokens: whether its next token cannot be sampled before the last one is known.
      cache_salt: isolates the prefix cache; requests share blocks only under an equal salt.
      lora: name and content digest of the adapter, None for the base model; its key in names of
        blocks.
      adapter: that adapter, which stays in memory as long as the request needs it.
      lora_slot: where it lies on the device; 0 for the base model, and while it waits for a place.
      mm_items: multimodal items in the prompt.
      cache_mode: what the request leaves behind in the prefix cache.
      priority: lower is more urgent; counts under the priority policy only.
      parent_id, index, num_samples: which sample of which user request this is.
      arrival_time: `time.monotonic()` seconds when the front end received it.
      output_token_ids: generated ids.
      block_tables: block ids in token order, one table per cache group; 0 stands for a block
        that left its group's sliding window.
      table_version: changes whenever an entry of the tables is replaced rather than appended;
        never the same for two requests.
      batch_row: row of the runner's per-request arrays, -1 while it holds no blocks.
      block_hashes: chain hashes of the full blocks known so far.
      num_published_blocks: leading blocks of the table whose content others can find.
      num_computed_tokens: tokens whose keys and values exist or are scheduled.
      num_in_flight: samples that the device has not returned yet.
      max_num_tokens: prompt plus output at which it ends, set by the scheduler.
      num_cached_tokens: prefix-cache hit of the first scheduling; -1 before it.
      work: what the engine has measured of its work on it, by kind; empty unless asked for.
      restored_tokens: of that hit, the tokens that came from lower tiers, by medium.
      num_preemptions: times its blocks were taken away.
      finish_reason, stop_reason: set when it ends.
      pooled: float32 `[hidden_size]`, the vector that `params` ask for, once its last prompt token
        is computed.
      hidden_sum: float32 `[hidden_size]`, of the prompt's tokens so far, if that is their mean.
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
    constraint: "GrammarConstraint | None" = None
    cache_salt: str | None = None
    lora: tuple[str, str] | None = None
    adapter: Adapter | None = None
    mm_items: tuple[MultimodalItem, ...] = ()
    cache_mode: CacheMode = CacheMode.DEFAULT
    priority: int = 0
    parent_id: str = ""
    index: int = 0
    num_samples: int = 1
    arrival_time: float = field(default_factory=time.monotonic)

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])
    table_version: int = 0
    batch_row: int = -1
    lora_slot: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    max_num_tokens: int = 0
    num_cached_tokens: int = -1
    restored_tokens: Mapping[str, int] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    pooled: np.ndarray | None = None
    hidden_sum: np.ndarray | None = None

    queued_time: float = 0.0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    # Follow from the fields above; kept because every step asks for them.
    num_prompt_tokens: int = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    needs_known_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        if self.adapter is not None:
            self.lora = self.adapter.key
        eos = self.eos_token_id
        self.end_token_ids = self.stop_token_ids if eos is None else self.stop_token_ids | {eos}
        edits = self.logit_edits
        self.needs_known_tokens = edits is not None and edits.depends_on_tokens

    @property
    def block_ids(self) -> list[int]:
        """The block table of the first cache group, which never drops a block."""
        return self.block_tables[0]

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def must_wait_for_sample(self) -> bool:
        """Whether it cannot go on before its sample in flight is known."""
        # The first: that sample is its last.
        is_last = self.num_tokens + self.num_in_flight >= self.max_num_tokens
        return is_last or self.needs_known_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the steps that compute its prompt have to score the prompt's tokens, too."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of its prompt has to be computed, as no cache has the hidden states."""
        return self.scores_prompt or self.params.pools_prompt

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return known token ids `start:stop` of prompt and output."""
        num_prompt = self.num_prompt_tokens
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        return [*prompt, *output]
