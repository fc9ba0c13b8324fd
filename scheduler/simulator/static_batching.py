"""Static batching: a batch starts together and ends with its longest request."""

from dataclasses import dataclass
from itertools import batched

from paged.scheduler.simulator.step_cost import StepCost, StepLoad
from paged.scheduler.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """What serving a trace in fixed batches took.

    Attributes:
      output_tokens: tokens that requests asked for; what finished rows compute is not counted.
      num_steps: steps, one per batch for all its prompts and one per further token.
      seconds: their time.
    """

    output_tokens: int
    num_steps: int
    seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput."""
        return self.output_tokens / self.seconds


def simulate_static_batching(trace: Trace, batch_size: int, cost: StepCost) -> StaticBatching:
    """Serve a trace in order, `batch_size` requests at a time, and return how long it takes.

    All prompts of a batch are computed in its first step. From then on every row of the batch
    computes one token per step until the longest output is complete, its own or not. Compare with
    `simulate` at the same `concurrency`.

    Args:
      trace: arrival times do not matter.
      batch_size: requests per batch.
      cost: how long a step takes.

    Raises: ValueError if `batch_size` is below 1.
    Source: request-level scheduling as in Orca, OSDI 2022, section 3.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    output_tokens = num_steps = 0
    seconds = 0.0
    for batch in batched(trace, batch_size):
        prompts = [request.prompt_tokens for request in batch]
        context = sum(prompts)
        pairs = sum([n * (n + 1) // 2 for n in prompts])
        seconds += cost.step_seconds(StepLoad(context, len(batch), pairs, context))
        longest = max([request.output_tokens for request in batch])
        for _ in range(longest - 1):
            context += len(batch)
            seconds += cost.step_seconds(StepLoad(len(batch), len(batch), context, context))
        output_tokens += sum([request.output_tokens for request in batch])
        num_steps += longest
    return StaticBatching(output_tokens, num_steps, seconds)
