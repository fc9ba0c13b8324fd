"""`StepPlan`: what one `schedule` call has decided so far."""

from collections.abc import Sequence

from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.request import Request


class StepPlan:
    """The rows of a step in the making and what is left of its token budget (mutable).

    Args:
      budget: tokens of the step.
      request_cap: most tokens of one request.

    Attributes:
      budget: tokens left.
      preempted: requests that lost their blocks.
      is_short_of_blocks: somebody gave up blocks, so nobody new may take any.
    """

    __slots__ = (
        "_longer",
        "_request_cap",
        "_single",
        "budget",
        "is_short_of_blocks",
        "preempted",
    )

    def __init__(self, budget: int, request_cap: int) -> None:
        self.budget = budget
        self.preempted: list[Request] = []
        self.is_short_of_blocks = False
        self._request_cap = request_cap
        self._single: list[ScheduledRequest] = []
        self._longer: list[ScheduledRequest] = []

    def clip(self, num_tokens: int) -> int:
        """Return how many of these tokens one request may compute in what is left of the step."""
        return min(num_tokens, self.budget, self._request_cap)

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` of a request, whose blocks are ready."""
        start = request.num_computed_tokens
        end = start + num_tokens
        in_flight = request.num_in_flight
        num_known = request.num_tokens
        samples = end == num_known + in_flight
        # Now and not when the step returns, so that the next one can be scheduled meanwhile.
        request.num_computed_tokens = end
        if samples:
            request.num_in_flight = in_flight + 1
        self.budget -= num_tokens
        rows = self._single if num_tokens == 1 else self._longer
        rows.append(ScheduledRequest(request, start, num_tokens, samples, end > num_known))

    def add_decode(self, request: Request, start: int, in_flight: int) -> None:
        """Schedule the one token that a request has left, known or in flight; fast."""
        request.num_computed_tokens = start + 1
        request.num_in_flight = in_flight + 1
        self.budget -= 1
        self._single.append(ScheduledRequest(request, start, 1, True, in_flight > 0))

    def remove(self, request: Request) -> ScheduledRequest | None:
        """Take a request out of the step and give its tokens back; None if it was not in it."""
        for rows in (self._single, self._longer):
            for index, row in enumerate(rows):
                if row.request is request:
                    del rows[index]
                    self.budget += row.num_tokens
                    request.num_in_flight -= row.samples
                    return row
        return None

    def output(
        self,
        *,
        block_copies: Sequence[tuple[int, int]] = (),
        saves: Sequence[tuple[int, bytes]] = (),
        restores: Sequence[object] = (),
    ) -> SchedulerOutput:
        """Return the step as a message: single tokens first, which kernels handle apart."""
        longer = self._longer
        return SchedulerOutput(
            scheduled=(*self._single, *longer),
            num_tokens=len(self._single) + sum(row.num_tokens for row in longer),
            preempted=tuple(self.preempted),
            block_copies=tuple(block_copies),
            saves=tuple(saves),
            restores=tuple(restores),
        )
