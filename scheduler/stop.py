"""Engine-side stop conditions: token ids and lengths. Stop strings are the detokenizer's."""

from paged.scheduler.output import FinishReason
from paged.scheduler.request import Request

type Stop = tuple[FinishReason, int | None]
"""Finish reason, and the stop token id that caused it where the caller listed one."""


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """Return why the request ends with its last generated token, None if it goes on.

    The order is observable: an end-of-sequence token at the last allowed position is a stop, not
    a length. `min_tokens` does not appear here because it masks the logits of all stop tokens.

    Source: vLLM `v1/core/sched/utils.py`.
    """
    last = request.output_token_ids[-1]
    if last == request.eos_token_id:
        return FinishReason.STOP, None
    if last in request.stop_token_ids:
        return FinishReason.STOP, last
    if request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    if len(request.output_token_ids) >= request.max_tokens:
        return FinishReason.LENGTH, None
    return None
