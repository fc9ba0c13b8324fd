"""`Workload`: how long requests are, and what prefills and decodes of them load a step with."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from paged.models.config import ModelConfig
from paged.scheduler.simulator.step_cost import StepLoad
from paged.scheduler.step_work import attended_pairs, read_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all alike.

    Attributes:
      input_len, output_len: tokens of prompt and answer.
      shared_prefix_len: tokens at the start of every prompt that are the same in all, and cached.

    Raises: ValueError for lengths that contradict each other.
    """

    input_len: int = 1024
    output_len: int = 256
    shared_prefix_len: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.shared_prefix_len < self.input_len:
            raise ValueError(
                f"shared_prefix_len={self.shared_prefix_len} must be at least 0 and below "
                f"input_len={self.input_len}, of which it is the beginning."
            )

    @property
    def total_len(self) -> int:
        """Tokens of one request when it ends."""
        return self.input_len + self.output_len

    @property
    def mean_context(self) -> int:
        """Tokens that a decode attends to, on average over the answer."""
        return self.input_len + self.output_len // 2


def decode_load(model: ModelConfig, batch: int, context: int) -> StepLoad:
    """Return a step of one token for each of `batch` requests, with `context` tokens each."""
    seen = _mean_over_layers(model, lambda window: min(context, window or context))
    return StepLoad(batch, batch, batch * seen, batch * seen)


def prefill_loads(
    model: ModelConfig, num_tokens: int, *, start: int = 0, budget: int
) -> list[StepLoad]:
    """Return the steps of one prompt that has the engine for itself.

    Args:
      model: whose layers may have sliding windows.
      num_tokens: of the prompt.
      start: tokens of it that are cached.
      budget: most tokens of one step.
    """
    loads = []
    while start < num_tokens:
        count = min(budget, num_tokens - start)
        loads.append(_chunk_load(model, start, count, is_last=start + count == num_tokens))
        start += count
    return loads


def _chunk_load(model: ModelConfig, start: int, count: int, *, is_last: bool) -> StepLoad:
    return StepLoad(
        count,
        int(is_last),
        _mean_over_layers(model, lambda window: attended_pairs(start, count, window)),
        _mean_over_layers(model, lambda window: read_tokens(start, count, window)),
    )


def _mean_over_layers(model: ModelConfig, count: Callable[[int | None], int]) -> int:
    """Return the mean of what layers count by their windows: a load is per layer."""
    windows = Counter(model.layer_windows).items()
    return round(sum(layers * count(window) for window, layers in windows) / model.num_layers)
