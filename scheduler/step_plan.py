"""`StepPlan`: what one `schedule` call has decided so far."""

import itertools
from collections.abc import Sequence

from paged.scheduler.kv_manager import KVManager
from paged.scheduler.lora_store import Adapter
from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.request import Request
from paged.scheduler.step_rows import StepRows


class StepPlan:
    """The rows of a step in the making and what is left of its token budget (mutable).

    Args:
      budget: tokens of the step.
      request_cap: most tokens of one request.

    Attributes:
      budget: tokens left.
      preempted: requests that lost their blocks.
      is_short_of_blocks: somebody gave up blocks, so nobody new may take any.
      scores_prompts: some request wants its prompt's tokens scored.
    """

    __slots__ = (
        "_longer",
        "_request_cap",
        "_single",
        "budget",
        "is_short_of_blocks",
        "preempted",
        "scores_prompts",
    )

    def __init__(self, budget: int, request_cap: int) -> None:
        self.budget = budget
        self.preempted: list[Request] = []
        self.is_short_of_blocks = False
        self.scores_prompts = False
        self._request_cap = request_cap
        self._single = StepRows()
        self._longer = StepRows()

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
        if request.scores_prompt:
            self.scores_prompts = True
        rows = self._single if num_tokens == 1 else self._longer
        rows.append(request, start, num_tokens, samples, end > num_known)

    def add_decodes(
        self, requests: Sequence[Request], first: int, kv: KVManager, block_size: int
    ) -> int:
        """Schedule requests with a single token left, known or in flight; fast.

        Args:
          requests: running; no window of theirs passes, and no block is shared.
          first: index of the first one to look at.
          kv: their block tables.
          block_size: tokens per block.

        Returns: index of the first request that has to be looked at more closely, because it has
          more tokens left, has to wait, or finds no free block.
        """
        rows = self._single
        extend = kv.extend
        add_start, add_in_flight = rows.starts.append, rows.inputs_in_flight.append
        last_offset = block_size - 1
        stop = first
        for request in itertools.islice(requests, first, first + self.budget):
            in_flight = request.num_in_flight
            start = request.num_computed_tokens
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids) + in_flight
            if (
                num_tokens != start + 1
                or num_tokens >= request.max_num_tokens
                or (in_flight and request.needs_known_tokens)
                # Inside a block there is nothing to allocate and nothing to publish.
                or (not 0 < start % block_size < last_offset and not extend(request, 1))
            ):
                break
            request.num_computed_tokens = num_tokens
            request.num_in_flight = in_flight + 1
            add_start(start)
            add_in_flight(in_flight > 0)
            stop += 1
        count = stop - first
        rows.requests += requests[first:stop]
        rows.counts += [1] * count
        rows.samples += [True] * count
        self.budget -= count
        return stop

    def remove(self, request: Request) -> ScheduledRequest | None:
        """Take a request out of the step and give its tokens back; None if it was not in it."""
        for rows in (self._single, self._longer):
            for index, other in enumerate(rows.requests):
                if other is request:
                    row = rows.pop(index)
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
        lora_loads: Sequence[tuple[int, Adapter]] = (),
    ) -> SchedulerOutput:
        """Return the step as a message: single tokens first, which kernels handle apart."""
        rows = self._single
        if self._longer:
            rows.extend(self._longer)
        return SchedulerOutput(
            scheduled=rows,
            num_tokens=sum(rows.counts),
            preempted=tuple(self.preempted),
            block_copies=tuple(block_copies),
            saves=tuple(saves),
            restores=tuple(restores),
            lora_loads=tuple(lora_loads),
            scores_prompts=self.scores_prompts,
        )
