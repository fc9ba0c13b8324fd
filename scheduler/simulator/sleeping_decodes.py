"""`SleepingDecodes`: decode rows that nothing happens to for a known number of steps.

A decoding request computes one token per step. The block pool notices only two of `block_size`
such steps, where a block is taken and where one becomes full, and the scheduler only the last.
Until then the row is left out of `schedule`: its `num_computed_tokens` says that all its tokens are
computed, which the scheduler knows from requests whose token is still on the device, and the token
budget is lowered by one for it. When it wakes, the tokens of the steps it slept are put in.

This leaves every decision as it was: decodes come before prefill chunks in the order of admission,
so that a row asleep would have got its token; a row that is preempted asleep is settled after
`schedule`, which does not look at a victim's tokens. `tests/scheduler/simulator/` compares whole
simulations with and without.
"""

import heapq

from paged.scheduler.simulator.simulated_request import TOKEN, SimulatedRequest


class SleepingDecodes:
    """The rows left out of the steps, by the step in which each has to be back (mutable).

    Attributes:
      num_asleep: rows left out.
      context_tokens: sum of their contexts in the coming step, its own tokens included.
    """

    def __init__(self, block_size: int, enable_caching: bool, max_model_len: int) -> None:
        self.num_asleep = 0
        self.context_tokens = 0
        self._block_size = block_size
        self._enable_caching = enable_caching
        self._max_model_len = max_model_len
        self._due: dict[int, list[SimulatedRequest]] = {}
        self._steps: list[int] = []  # heap of the keys of `_due`

    @property
    def next_wake_step(self) -> int | None:
        """The first step in which some row has to be back, None if none is asleep."""
        return self._steps[0] if self._steps else None

    def try_sleep(self, request: SimulatedRequest, step: int) -> bool:
        """Leave out a row that has just sampled, from `step` on; say whether it is worth it."""
        wake_step = step + self._steps_until_event(request) - 1
        if wake_step == step:
            return False
        request.asleep_since = step
        request.wake_step = wake_step
        num_tokens = request.num_tokens
        request.num_computed_tokens = num_tokens
        self.num_asleep += 1
        self.context_tokens += num_tokens
        if wake_step in self._due:
            self._due[wake_step].append(request)
        else:
            self._due[wake_step] = [request]
            heapq.heappush(self._steps, wake_step)
        return True

    def wake(self, step: int, now: float) -> list[SimulatedRequest]:
        """Return the rows that have to be in `step`, with the tokens they slept through.

        Args:
          step: about to be scheduled.
          now: when the step before it ended, seconds.
        """
        if not self._steps or self._steps[0] != step:
            return []
        heapq.heappop(self._steps)
        # A request that was preempted meanwhile is no longer due here.
        due = [r for r in self._due.pop(step) if r.wake_step == step]
        for request in due:
            request.num_computed_tokens = self.settle(request, step, now)
        return due

    def settle(self, request: SimulatedRequest, step: int, now: float) -> int:
        """Give a sleeping request the tokens of the steps before `step`; return those computed."""
        slept = step - request.asleep_since
        # All but the last token, which is computed in the coming step.
        computed = request.num_tokens - 1 + slept
        request.output_token_ids += [TOKEN] * slept
        if slept:
            request.last_token_time = now
        if self._enable_caching:
            request.extend_known_hashes(computed + 1, self._block_size)
        request.asleep_since = request.wake_step = -1
        self.num_asleep -= 1
        self.context_tokens -= computed + 1
        return computed

    def advance(self) -> None:
        """One more step has passed."""
        self.context_tokens += self.num_asleep

    def _steps_until_event(self, request: SimulatedRequest) -> int:
        """Return the number of the step, 1 for the coming one, that the row must be part of."""
        computed = request.num_computed_tokens
        block_size = self._block_size
        steps = min(
            request.max_tokens - len(request.output_token_ids),
            self._max_model_len - request.num_tokens,
            len(request.block_ids) * block_size - computed + 1,
        )
        if self._enable_caching:
            steps = min(steps, (request.num_published_blocks + 1) * block_size - computed)
        return steps
