"""`Mailroom`: the mailboxes of all unfinished requests, and what is put into them."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from paged.scheduler.deltas import Delta
from paged.scheduler.errors import SlowConsumerError
from paged.scheduler.mailbox import Mailbox

logger = logging.getLogger(__name__)


class Mailroom:
    """Sorts deltas to their consumers (mutable); used on the event loop only.

    Args:
      max_backlog: most deltas that wait for a consumer; a request with more is ended.
      abort: ends a request by its id.

    Attributes:
      idle: set while there is no mailbox.
    """

    def __init__(self, max_backlog: int, abort: Callable[[str], None]) -> None:
        self._max_backlog = max_backlog
        self._abort = abort
        self._boxes: dict[str, Mailbox] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._boxes)

    @property
    def num_samples(self) -> int:
        """Samples of all requests together."""
        return sum(box.num_samples for box in self._boxes.values())

    def open(self, request_id: str, num_samples: int) -> Mailbox:
        """Return a mailbox for a new request.

        Raises:
          ValueError: if the id is in use.
        """
        if request_id in self._boxes:
            raise ValueError(f"Request {request_id!r} is not finished yet; use another request_id.")
        box = self._boxes[request_id] = Mailbox(num_samples)
        self.idle.clear()
        return box

    def close(self, request_id: str) -> None:
        """Remove a mailbox: its consumer has all, or is gone."""
        del self._boxes[request_id]
        if not self._boxes:
            self.idle.set()

    def get(self, request_id: str) -> Mailbox | None:
        """Return the mailbox of a request, if it has one."""
        return self._boxes.get(request_id)

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Put the deltas of a step where they belong."""
        boxes = self._boxes
        for delta in deltas:
            box = boxes.get(delta.parent.request_id)
            if box is not None:
                box.deltas.append(delta)
                if len(box.deltas) > self._max_backlog:
                    self._give_up(delta.parent.request_id, box)
                box.wake()

    def refuse(self, request_id: str, error: Exception) -> None:
        """Let a consumer know that its request was not queued."""
        box = self._boxes.get(request_id)
        if box is not None:
            box.error = error
            box.wake()

    def wake_everyone(self) -> None:
        """Let every consumer look again."""
        for box in self._boxes.values():
            box.wake()

    def _give_up(self, request_id: str, box: Mailbox) -> None:
        """End a request whose consumer is too far behind, and forget what it has not taken."""
        error = SlowConsumerError(
            f"The client was more than {self._max_backlog} tokens behind and its request was ended."
        )
        if box.error is None:
            logger.warning("Request %s: %s", request_id, error)
            box.error = error
            self._abort(request_id)
        box.deltas.clear()
