"""`SimulatedRequest`: a real `Request` whose tokens are counted and whose content is named."""

from dataclasses import dataclass, field
from typing import cast

from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.simulator.content import block_hashes
from paged.scheduler.simulator.trace import TraceRequest

_PARAMS = SamplingParams()

TOKEN = 0
"""What every sampled token is: outputs are counted, and no id ends a simulated request."""


@dataclass(slots=True, eq=False)
class SimulatedRequest(Request):
    """A request of the scheduler with what the simulator remembers about it (mutable).

    Attributes:
      pass_index: of the trace.
      output_length: tokens the trace asks for.
      content_hashes: keys of all full blocks of prompt and output; `block_hashes` has those that
        are known so far, as it would in the engine.
      is_admitted: it has been scheduled before.
      seen_blocks, seen_computed: its blocks and computed tokens after the last step with its row.
      max_computed: most tokens it had computed when it was preempted; below that is recomputation.
      asleep_since, wake_step: the steps between which its row is left out; -1 while it is awake.
    """

    pass_index: int = 0
    output_length: int = 0
    content_hashes: list[bytes] = field(default_factory=list)
    is_admitted: bool = False
    seen_blocks: int = 0
    seen_computed: int = 0
    max_computed: int = 0
    asleep_since: int = -1
    wake_step: int = -1

    def extend_known_hashes(self, num_tokens: int, block_size: int) -> None:
        """Make the keys of the full blocks of the first `num_tokens` tokens known.

        Done just before the scheduler would hash the tokens itself, which therefore finds nothing
        to hash.
        """
        known = self.block_hashes
        known += self.content_hashes[len(known) : num_tokens // block_size]


def make_request(
    index: int, traced: TraceRequest, arrival_time: float, block_size: int, enable_caching: bool
) -> SimulatedRequest:
    """Return the request for entry `index` of a trace; `arrival_time` is in simulated seconds."""
    num_prompt_tokens = traced.prompt_tokens
    hashes: list[bytes] = []
    if enable_caching:
        output = f"output-{index}" if traced.output is None else traced.output
        hashes = block_hashes((*traced.prompt, (output, traced.output_tokens)), block_size)
    return SimulatedRequest(
        str(index),
        # A range has a tuple's length and slices, and costs no memory: nobody reads the ids.
        cast(tuple[int, ...], range(num_prompt_tokens)),
        _PARAMS,
        traced.output_tokens,
        arrival_time=arrival_time,
        priority=traced.priority,
        block_hashes=hashes[: num_prompt_tokens // block_size],
        pass_index=traced.pass_index,
        output_length=traced.output_tokens,
        content_hashes=hashes,
    )
