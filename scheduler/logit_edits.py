"""`LogitEdits`: the token ids whose logits one request changes, and by how much, at each step.

Biases, allow-lists, bad words and stop tokens held back by `min_tokens` are all the same thing to
the device: a short list of (token id, value to add), where minus infinity forbids the token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paged.scheduler.params import MAX_LOGIT_EDITS, ParameterError, SamplingParams

_FORBID = -math.inf


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Logit edits of one request.

    Attributes:
      fixed: (token id, value) pairs of every step.
      bad_words: token sequences that must not be completed.
      held_back: stop ids forbidden until `min_tokens` tokens exist.
      min_tokens: as in the sampling parameters.
      only_edits: every token that is not in `fixed` is forbidden (an allow-list).
    """

    fixed: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    held_back: tuple[int, ...] = ()
    min_tokens: int = 0
    only_edits: bool = False

    @property
    def depends_on_tokens(self) -> bool:
        """Whether they depend on which tokens came before, and not only on how many.

        Such a request cannot take a step while its last sample is still on the device.
        """
        return any(len(word) > 1 for word in self.bad_words)

    def at(
        self, output_token_ids: Sequence[int], num_in_flight: int = 0
    ) -> list[tuple[int, float]]:
        """Return the edits of the next step; forbidding ones last.

        Args:
          output_token_ids: the output that the host knows.
          num_in_flight: outputs after it that only the device knows.

        Raises:
          ValueError: if they depend on tokens in flight.
        """
        if num_in_flight and self.depends_on_tokens:
            raise ValueError(
                f"bad words depend on {num_in_flight} tokens that the device has not returned; "
                "schedule the request after them."
            )
        edits = list(self.fixed)
        for word in self.bad_words:
            prefix = word[:-1]
            if len(prefix) <= len(output_token_ids) and (
                not prefix or tuple(output_token_ids[-len(prefix) :]) == prefix
            ):
                edits.append((word[-1], _FORBID))
        if len(output_token_ids) + num_in_flight < self.min_tokens:
            edits += [(token_id, _FORBID) for token_id in self.held_back]
        return edits


def make_logit_edits(
    params: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> LogitEdits | None:
    """Return the edits that `params` ask for, or None if there are none.

    Args:
      params: validated sampling parameters.
      vocab_size: ids of this value or more are refused.
      stop_ids: every id that can end the request, held back until `min_tokens`.
      bad_words: token sequences of `params.bad_words`.

    Raises:
      ParameterError: for an id outside the vocabulary, or more than `MAX_LOGIT_EDITS` edits.
    """
    bias = dict(params.logit_bias or {})
    allowed = params.allowed_token_ids
    for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
        for token_id in ids:
            if token_id >= vocab_size:
                raise ParameterError(
                    name, token_id, f"must hold ids below the vocabulary size {vocab_size}"
                )
    if allowed is None:
        fixed = tuple(bias.items())
    else:
        fixed = tuple((token_id, bias.get(token_id, 0.0)) for token_id in allowed)
    held_back = tuple(dict.fromkeys(stop_ids)) if params.min_tokens else ()
    if not (fixed or bad_words or held_back):
        return None
    total = len(fixed) + len(bad_words) + len(held_back)
    if total > MAX_LOGIT_EDITS:
        name = _largest_contributor(len(fixed), len(bad_words), allowed is not None)
        raise ParameterError(
            name,
            total,
            f"must not change more than {MAX_LOGIT_EDITS} token ids together with the other "
            "biases, bad words and stop ids held back by min_tokens",
        )
    return LogitEdits(
        fixed=fixed,
        bad_words=tuple(tuple(word) for word in bad_words),
        held_back=held_back,
        min_tokens=params.min_tokens,
        only_edits=allowed is not None,
    )


def _largest_contributor(num_fixed: int, num_bad_words: int, has_allow_list: bool) -> str:
    if num_bad_words > num_fixed:
        return "bad_words"
    if num_fixed:
        return "allowed_token_ids" if has_allow_list else "logit_bias"
    return "stop_token_ids"
