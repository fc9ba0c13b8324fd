"""`Delta`: what a step adds to one sample, and `join`: several of them as a caller's output."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paged.scheduler.output import CompletionOutput, PositionLogprobs, RequestOutput


@dataclass(slots=True, eq=False)
class ParentRequest:
    """A user request, whose samples are requests of the scheduler (mutable).

    Attributes:
      request_id: as given.
      prompt: the prompt's text, where it was given as text.
      prompt_token_ids: ids of the prompt.
      unfinished: ids of the samples that have not ended.
      num_cached_tokens: prefix-cache hit of the sample whose first token came first, as the others
        find what that one has computed; -1 before.
      prompt_logprobs: by position, complete before the first delta; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    unfinished: set[str] = field(default_factory=set)
    num_cached_tokens: int = -1
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None


@dataclass(slots=True, eq=False)
class Delta:
    """New tokens of one sample, which nobody changes; not frozen for the sake of speed.

    Attributes:
      parent: the request it belongs to.
      index: which of the `n` samples.
      text, token_ids, logprobs, finish_reason, stop_reason: as in `CompletionOutput`.
      finished: it is the last of its request.
      pooled: as in `RequestOutput`.
    """

    parent: ParentRequest
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    finished: bool = False
    pooled: np.ndarray | None = None


def join(deltas: Sequence[Delta]) -> RequestOutput:
    """Return one output for deltas of the same request, at least one, given in their order."""
    last = deltas[-1]
    parent = last.parent
    completions: tuple[CompletionOutput, ...]
    if len(deltas) == 1:
        completions = (
            CompletionOutput(
                last.index,
                last.text,
                last.token_ids,
                last.logprobs,
                last.finish_reason,
                last.stop_reason,
            ),
        )
    else:
        by_index: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
        completions = tuple(map(join_deltas, by_index.values()))
    return RequestOutput(
        parent.request_id,
        parent.prompt,
        parent.prompt_token_ids,
        completions,
        last.finished,
        parent.num_cached_tokens,
        last.pooled,
        parent.prompt_logprobs,
    )


def join_deltas(deltas: Sequence[Delta] | Sequence[CompletionOutput]) -> CompletionOutput:
    """Return deltas of one sample, at least one, as one."""
    last = deltas[-1]
    positions = [position for delta in deltas for position in delta.logprobs or ()]
    return CompletionOutput(
        index=last.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple([token_id for delta in deltas for token_id in delta.token_ids]),
        logprobs=tuple(positions) if positions else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
