"""`PrefillLimits`: how much of a step long prompts may take from everybody else."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.scheduler.request import Request


# What counts as long when nothing else is said: the share of the model's context, as in vLLM.
_LONG_SHARE = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """Limits on prompts that are computed in parts; all off by default.

    Attributes:
      long_prefill_token_threshold: most tokens of one request per step while it is not the only
        one, and the length from which a prompt is long; 0 sets no limit.
      max_num_partial_prefills: most running requests whose prompts are only partly computed; None
        sets no limit.
      max_long_partial_prefills: how many of those may be long; shorter prompts overtake the long
        ones that wait for this. None sets no limit.

    Raises: ValueError for numbers that make no sense together.
    Source: vLLM `config/scheduler.py`.
    """

    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None

    def __post_init__(self) -> None:
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} must be at "
                "least 0."
            )
        for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        most, most_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if most is not None and most_long is not None and most_long > most:
            raise ValueError(
                f"max_long_partial_prefills={most_long} must not exceed "
                f"max_num_partial_prefills={most}, which counts them too."
            )

    def request_cap(self, budget: int, num_requests: int) -> int:
        """Return the most tokens of one request in a step of `budget` tokens."""
        if self.long_prefill_token_threshold and num_requests > 1:
            return self.long_prefill_token_threshold
        return budget

    @property
    def limits_admission(self) -> bool:
        """Whether a prompt may have to wait for other prompts."""
        return self.max_num_partial_prefills is not None or (
            self.max_long_partial_prefills is not None
        )

    def count(self, running: Iterable["Request"], max_model_len: int) -> "PartialPrefills":
        """Return the partial prefills of a step so far."""
        threshold = self.long_prefill_token_threshold or int(max_model_len * _LONG_SHARE)
        partial = PartialPrefills(self, threshold)
        for request in running:
            if request.num_computed_tokens < request.num_tokens:
                partial.add(request)
        return partial


class PartialPrefills:
    """Prompts that will be partly computed after a step (mutable)."""

    __slots__ = ("_limits", "_num_long", "_num_partial", "_threshold")

    def __init__(self, limits: PrefillLimits, threshold: int) -> None:
        self._limits = limits
        self._threshold = threshold
        self._num_partial = 0
        self._num_long = 0

    def add(self, request: "Request") -> None:
        """Count one more."""
        self._num_partial += 1
        self._num_long += request.num_tokens > self._threshold

    def has_room_for(self, request: "Request") -> bool:
        """Say whether one more prompt may be computed in parts."""
        most, most_long = (
            self._limits.max_num_partial_prefills,
            self._limits.max_long_partial_prefills,
        )
        if most is not None and self._num_partial >= most:
            return False
        is_long = request.num_tokens > self._threshold
        return not (is_long and most_long is not None and self._num_long >= most_long)


def check_limits(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    enable_chunked_prefill: bool,
) -> None:
    """Refuse limits under which some request could never be served.

    Raises: ValueError.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1.")
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
            f"max_num_seqs={max_num_seqs}, or some running request could never decode."
        )
    if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
            f"max_model_len={max_model_len} without chunked prefill; raise it, or enable "
            "chunked prefill."
        )
