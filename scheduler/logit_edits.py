"""`LogitEdits`: the token ids whose logits one request changes, and by how much, at each step.

Biases, allow-lists, bad words and stop tokens held back by `min_tokens` are all the same thing to
the device: a short list of (token id, value to add), where minus infinity forbids the token. A list
that is not short goes there as biases and a bit for every token (docs/decisions/0048).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paged.scheduler.params import (
    MAX_LOGIT_BIASES,
    MAX_PACKED_EDITS,
    ParameterError,
    SamplingParams,
)

_FORBID = -math.inf
_WORD_BITS = 32  # tokens per word of a mask


class WideRow(NamedTuple):
    """What a request with many edits changes at every step; its samples share the arrays.

    Attributes:
      allowed: int32 `[mask_words]`, a bit per token, 0 forbids it; None allows all.
      bias_ids, bias_values: int32 and float32 `[num_biases]`.
    """

    allowed: np.ndarray | None
    bias_ids: np.ndarray
    bias_values: np.ndarray


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Logit edits of one request.

    Attributes:
      fixed: (token id, value) pairs of every step; none on the long way.
      bad_words: token sequences that must not be completed.
      held_back: stop ids forbidden until `min_tokens` tokens exist.
      min_tokens: as in the sampling parameters.
      only_edits: every token that is not in `fixed` is forbidden (an allow-list).
      wide: what holds at every step, on the long way; None: the edits fit into every step's packed
        array.
    """

    fixed: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    held_back: tuple[int, ...] = ()
    min_tokens: int = 0
    only_edits: bool = False
    wide: WideRow | None = None
    # Of the bad words of several tokens, those whose last token but one this is.
    _by_last: Mapping[int, list[tuple[int, ...]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_last: dict[int, list[tuple[int, ...]]] = {}
        for word in self.bad_words:
            if len(word) > 1:
                by_last.setdefault(word[-2], []).append(word)
        object.__setattr__(self, "_by_last", by_last)

    @property
    def depends_on_tokens(self) -> bool:
        """Whether they depend on which tokens came before, and not only on how many.

        Such a request cannot take a step while its last sample is still on the device.
        """
        return bool(self._by_last)

    def at(
        self, output_token_ids: Sequence[int], num_in_flight: int = 0
    ) -> list[tuple[int, float]]:
        """Return the edits of the next step, on the short way; forbidding ones last.

        Args:
          output_token_ids: the output that the host knows.
          num_in_flight: outputs after it that only the device knows.

        Raises:
          ValueError: if they depend on tokens in flight.
        """
        singles = (word[0] for word in self.bad_words if len(word) == 1)
        forbidden = [*singles, *self.forbidden_at(output_token_ids, num_in_flight)]
        return [*self.fixed, *((token_id, _FORBID) for token_id in forbidden)]

    def forbidden_at(self, output_token_ids: Sequence[int], num_in_flight: int = 0) -> list[int]:
        """Return what only the next step forbids; arguments and errors as those of `at`."""
        if num_in_flight and self.depends_on_tokens:
            raise ValueError(
                f"bad words depend on {num_in_flight} tokens that the device has not returned; "
                "schedule the request after them."
            )
        forbidden = list(self._completions(output_token_ids))
        if len(output_token_ids) + num_in_flight < self.min_tokens:
            forbidden += self.held_back
        return forbidden

    def _completions(self, output_token_ids: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that would complete a bad word of several tokens."""
        if not self._by_last or not output_token_ids:
            return
        for word in self._by_last.get(output_token_ids[-1], ()):
            if tuple(output_token_ids[-len(word) + 1 :]) == word[:-1]:
                yield word[-1]


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
      ParameterError: for an id outside the vocabulary, or more than `MAX_LOGIT_BIASES` biases.
    """
    bias = dict(params.logit_bias or {})
    allowed = params.allowed_token_ids
    for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
        if ids and max(ids) >= vocab_size:
            raise ParameterError(
                name, max(ids), f"must hold ids below the vocabulary size {vocab_size}"
            )
    if len(bias) > MAX_LOGIT_BIASES:
        raise ParameterError(
            "logit_bias", f"{len(bias)} ids", f"must have at most {MAX_LOGIT_BIASES} token ids"
        )
    held_back = tuple(dict.fromkeys(stop_ids)) if params.min_tokens else ()
    num_fixed = len(bias if allowed is None else allowed)
    if not (num_fixed or bad_words or held_back):
        return None
    is_wide = num_fixed + len(bad_words) + len(held_back) > MAX_PACKED_EDITS
    fixed: tuple[tuple[int, float], ...] = ()
    if not is_wide:
        fixed = tuple(bias.items() if allowed is None else ((i, bias.get(i, 0.0)) for i in allowed))
    return LogitEdits(
        fixed=fixed,
        bad_words=tuple(tuple(word) for word in bad_words),
        held_back=held_back,
        min_tokens=params.min_tokens,
        only_edits=allowed is not None,
        wide=_wide_row(allowed, bias, bad_words, vocab_size) if is_wide else None,
    )


def forbid(allowed: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear the bits of tokens in a row of a mask, int32 `[mask_words]`."""
    ids = np.fromiter(token_ids, np.int64)
    bits = np.left_shift(np.uint32(1), (ids % _WORD_BITS).astype(np.uint32))
    np.bitwise_and.at(allowed.view(np.uint32), ids // _WORD_BITS, ~bits)


def _wide_row(
    allowed: Sequence[int] | None,
    bias: Mapping[int, float],
    bad_words: Sequence[Sequence[int]],
    vocab_size: int,
) -> WideRow:
    singles = [word[0] for word in bad_words if len(word) == 1]
    mask: np.ndarray | None = None
    if allowed is not None or singles:
        mask = np.full(-(-vocab_size // _WORD_BITS), -1, np.int32)
    if allowed is not None:
        assert mask is not None
        is_listed = np.zeros(mask.size * _WORD_BITS, np.bool_)
        is_listed[np.array(allowed)] = True
        mask[:] = np.packbits(is_listed, bitorder="little").view("<i4")
    if mask is not None:
        forbid(mask, singles)
    return WideRow(
        mask, np.fromiter(bias, np.int32, len(bias)), np.fromiter(bias.values(), np.float32)
    )
