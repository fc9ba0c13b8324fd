"""`Mailbox`: deltas on the event loop that their consumer has not taken yet."""

import asyncio

from paged.scheduler.deltas import Delta


class Mailbox:
    """What one request's consumer has not taken yet; used on the event loop only.

    Deltas pile up unjoined: a consumer that is slower than the engine gets them as one output.

    Args:
      num_samples: of the request.

    Attributes:
      deltas: in the order of their steps; the consumer takes the list and leaves an empty one.
      error: why the request was never queued.
      num_samples: as given.
      is_aborted: somebody wants it to end, perhaps before the engine knows of it.
    """

    __slots__ = ("_waiter", "deltas", "error", "is_aborted", "num_samples")

    def __init__(self, num_samples: int) -> None:
        self.deltas: list[Delta] = []
        self.error: Exception | None = None
        self.num_samples = num_samples
        self.is_aborted = False
        self._waiter: asyncio.Future[None] | None = None

    def arrival(self) -> asyncio.Future[None]:
        """Return what is done when `wake` is called next; there is one consumer."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def wake(self) -> None:
        """Let the consumer look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # it is done if the consumer was cancelled
            waiter.set_result(None)
