"""`StepLoad` and `StepCost`: what a step computes, and how long that takes by some formula."""

from typing import NamedTuple, Protocol


class StepLoad(NamedTuple):
    """What the rows of one step compute, summed over rows; all that a cost may depend on.

    Attributes:
      num_tokens: new tokens.
      num_samples: rows whose logits are computed.
      attended_pairs: pairs of a new token and a token that it attends to, itself included.
      context_tokens: tokens whose keys and values are read, new ones included.
    """

    num_tokens: int = 0
    num_samples: int = 0
    attended_pairs: int = 0
    context_tokens: int = 0


class StepCost(Protocol):
    """How long steps take."""

    @property
    def name(self) -> str:
        """What results call it."""

    def step_seconds(self, load: StepLoad) -> float:
        """Return the time of a step, in seconds."""


class UnitSteps:
    """Every step takes one second: times count steps, and only hits and memory mean anything."""

    name = "steps"

    def step_seconds(self, load: StepLoad) -> float:
        """Return 1."""
        return 1.0
