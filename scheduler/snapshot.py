"""`EngineSnapshot`: blocks and requests as they are between two steps, for who watches."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from paged.scheduler.request import Request, RequestStatus
from paged.scheduler.scheduler import Scheduler

MAX_REQUESTS = 256
"""Most requests that a snapshot describes one by one."""


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Where one sample stands.

    Attributes:
      request_id, index, num_samples, cache_salt, num_prompt_tokens, num_computed_tokens,
        num_preemptions: as in `Request`.
      status: "waiting", "loading", "running" or "preempted".
      num_tokens: prompt plus generated tokens.
      max_num_tokens: prompt plus output at which it ends.
      num_cached_tokens: prefix-cache hit of the first scheduling; 0 before it.
      num_blocks: blocks in its tables.
    """

    request_id: str
    index: int
    num_samples: int
    cache_salt: str | None
    status: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_tokens: int
    max_num_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int

    @classmethod
    def of(cls, request: Request) -> "RequestSnapshot":
        """Return a request's figures as they are now."""
        return cls(
            request_id=request.request_id,
            index=request.index,
            num_samples=request.num_samples,
            cache_salt=request.cache_salt,
            status=request.status.value,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_tokens=request.num_tokens,
            max_num_tokens=request.max_num_tokens,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            num_blocks=sum(map(len, request.block_tables)),
            num_preemptions=request.num_preemptions,
        )


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What an engine holds between two steps.

    Attributes:
      block_size: tokens per block.
      ref_counts: by block id, how many block tables and pins hold it; the null block included.
      keys: by block id, the key of its content, None if that is not findable.
      num_running, num_waiting: all requests.
      requests: at most `MAX_REQUESTS`, the running ones first, in order of admission.
    """

    block_size: int
    ref_counts: list[int]
    keys: list[bytes | None]
    num_running: int
    num_waiting: int
    requests: tuple[RequestSnapshot, ...]


def take_snapshot(scheduler: Scheduler) -> EngineSnapshot:
    """Return a scheduler's state; nothing but copies, as the next step waits for it."""
    ref_counts, keys = scheduler.pool.copy_states()
    return EngineSnapshot(
        block_size=scheduler.pool.block_size,
        ref_counts=ref_counts,
        keys=keys,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        requests=tuple(map(RequestSnapshot.of, islice(_requests(scheduler), MAX_REQUESTS))),
    )


def _requests(scheduler: Scheduler) -> Iterator[Request]:
    others = (r for r in scheduler.unfinished if r.status is not RequestStatus.RUNNING)
    return chain(scheduler.running, others)


@dataclass(frozen=True, slots=True)
class BlockCells:
    """The pool as a row of cells, each of as many neighbouring blocks; the last may have fewer.

    Attributes:
      blocks_per_cell: blocks of a cell.
      num_free: blocks without content that nobody holds.
      num_cached: blocks that nobody holds, whose content can still be found.
      num_used: blocks that one request, or pin, holds.
      num_shared: blocks that several hold.
      held, cached: int `[num_cells]`, blocks of each cell that are held, or cached and not held.
      holders: int `[num_cells]`, holders of the most shared block of each cell.
    """

    blocks_per_cell: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    held: list[int]
    cached: list[int]
    holders: list[int]


def block_cells(snapshot: EngineSnapshot, max_cells: int) -> BlockCells:
    """Sum a snapshot's blocks up, the null block left out.

    Takes time in proportion to the pool: not for the engine's thread.

    Raises: ValueError if `max_cells` is below 1.
    """
    if max_cells < 1:
        raise ValueError(f"max_cells={max_cells} must be at least 1.")
    counts = np.array(snapshot.ref_counts[1:], np.int64)
    has_content = np.array([key is not None for key in snapshot.keys[1:]], bool)
    is_cached = has_content & (counts == 0)
    blocks_per_cell = max(1, -(-len(counts) // max_cells))
    padding = -len(counts) % blocks_per_cell

    def cells(values: np.ndarray) -> np.ndarray:
        return np.pad(values.astype(np.int64), (0, padding)).reshape(-1, blocks_per_cell)

    num_used, num_shared = int((counts == 1).sum()), int((counts > 1).sum())
    num_cached = int(is_cached.sum())
    return BlockCells(
        blocks_per_cell=blocks_per_cell,
        num_free=len(counts) - num_used - num_shared - num_cached,
        num_cached=num_cached,
        num_used=num_used,
        num_shared=num_shared,
        held=cells(counts > 0).sum(1).tolist(),
        cached=cells(is_cached).sum(1).tolist(),
        holders=cells(counts).max(1).tolist(),
    )
