"""`SampleIntake`: the tokens of a step back into its requests, whose end they may be."""

from collections.abc import Sequence
from typing import Protocol

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.output import FinishReason
from paged.scheduler.pins import PrefixPins
from paged.scheduler.request import CacheMode, Request, RequestStatus
from paged.scheduler.step_rows import StepRows, StepUpdates
from paged.scheduler.stop import check_stop


class Finish(Protocol):
    """Ends a request and frees its blocks."""

    def __call__(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """`stop_reason` is the stop token id if the caller listed it, or what went wrong."""
        ...


class SampleIntake:
    """Appends samples; looks closer only at requests to which more happens than one more token.

    Args:
      kv: block tables; names and publishes blocks that become full.
      pool: the blocks.
      pins: prompts to be kept.
      finish: ends a request.
      max_model_len: longest prompt plus output, tokens.
    """

    def __init__(
        self,
        kv: KVManager,
        pool: BlockPool,
        pins: PrefixPins,
        *,
        finish: Finish,
        max_model_len: int,
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._pins = pins
        self._finish = finish
        self._max_model_len = max_model_len

    def take(self, scheduled: StepRows, token_ids: Sequence[int], now: float) -> StepUpdates:
        """Append the token of every row that samples and has not ended since it was scheduled.

        Args:
          scheduled: the step.
          token_ids: one per row.
          now: monotonic seconds.
        """
        block_size = self._pool.block_size
        finished = RequestStatus.FINISHED
        updates = StepUpdates()
        add_row, add_gap = updates.rows.append, updates.gaps.append
        samples = scheduled.samples
        for row, (request, token_id) in enumerate(zip(scheduled.requests, token_ids, strict=True)):
            if not samples[row]:
                continue
            request.num_in_flight -= 1
            if request.status is finished:
                continue
            if request.constraint is not None:
                add_row(row)
                self._take_constrained(request, token_id, updates, now)
                continue
            output = request.output_token_ids
            is_first = not output
            output.append(token_id)
            add_row(row)
            add_gap(0.0 if is_first else now - request.last_token_time)
            request.last_token_time = now
            num_tokens = request.num_prompt_tokens + len(output)
            if is_first or not num_tokens % block_size:
                self._settle(request, updates, now)
            if token_id in request.end_token_ids or num_tokens >= request.max_num_tokens:
                self._end(request, updates)
        if len(updates.rows) == len(token_ids):
            updates.requests, updates.token_ids = scheduled.requests, list(token_ids)
        else:
            updates.requests = [scheduled.requests[row] for row in updates.rows]
            updates.token_ids = [token_ids[row] for row in updates.rows]
        return updates

    def _take_constrained(
        self, request: Request, token_id: int, updates: StepUpdates, now: float
    ) -> None:
        """Append a token that a grammar allows, and those that can only follow it."""
        constraint, output, ends = (
            request.constraint,
            request.output_token_ids,
            request.end_token_ids,
        )
        assert constraint is not None
        is_first, num_before = not output, request.num_tokens
        index = len(updates.rows) - 1
        updates.gaps.append(0.0 if is_first else now - request.last_token_time)
        if not constraint.accept(token_id):
            updates.replaced[index] = ()
            updates.ended.append(index)
            self._finish(request, FinishReason.ERROR, constraint.error)
            return
        output.append(token_id)
        if token_id not in ends:
            forced = constraint.take_forced(request.max_num_tokens - request.num_tokens)
            if forced:
                output += forced
                updates.replaced[index] = (token_id, *forced)
        request.last_token_time = now
        block_size = self._pool.block_size
        if request.num_tokens // block_size > num_before // block_size:
            self._name_blocks(request)
        if is_first:
            self._begin(request, updates, now)
        if output[-1] not in ends and constraint.is_over:
            updates.ended.append(index)
            self._finish(request, FinishReason.STOP)
        elif output[-1] in ends or request.num_tokens >= request.max_num_tokens:
            self._end(request, updates)

    def _settle(self, request: Request, updates: StepUpdates, now: float) -> None:
        """Do what a request's first token, or one that fills a block, entails."""
        if not request.num_tokens % self._pool.block_size:
            self._name_blocks(request)
        if len(request.output_token_ids) == 1:
            self._begin(request, updates, now)

    def _name_blocks(self, request: Request) -> None:
        """Name the blocks that became full, and publish those that are being computed."""
        self._kv.extend_hashes(request)
        if request.num_computed_tokens // self._pool.block_size > request.num_published_blocks:
            # A step in flight computes the last token of a block that only now has a name.
            self._kv.publish(request, request.num_computed_tokens)

    def _begin(self, request: Request, updates: StepUpdates, now: float) -> None:
        """Note a request's first token."""
        updates.firsts.append(len(updates.rows) - 1)
        request.first_token_time = now
        if request.cache_mode is CacheMode.PIN:
            self._pins.add(request)

    def _end(self, request: Request, updates: StepUpdates) -> None:
        """End a request whose last token is its last."""
        stop = check_stop(request, self._max_model_len)
        assert stop is not None
        updates.ended.append(len(updates.rows) - 1)
        self._finish(request, *stop)
