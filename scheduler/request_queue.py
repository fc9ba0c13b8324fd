"""`RequestQueue`: waiting requests, first come first served."""

from collections import OrderedDict
from collections.abc import Iterator

from paged.scheduler.request import Request


class RequestQueue:
    """Waiting requests in the order in which they will be admitted (mutable).

    Every operation is O(1), removal from the middle included: an abort of many waiting requests
    must not be quadratic. Another admission policy is another class with these methods.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request

    def push_preempted(self, request: Request) -> None:
        """Put back a request that had been admitted: before everyone who never was."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the next request without removing it."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it stands."""
        del self._requests[request.request_id]
