"""Waiting requests in the order in which they will be admitted: first come, or by priority."""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.scheduler.request import Request


SCHEDULING_POLICIES = ("fcfs", "priority")


class RequestQueue(ABC):
    """Waiting requests; every operation is at most O(log n) amortised.

    Removal from the middle included: an abort of many waiting requests must not be quadratic.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator["Request"]:
        """Iterate in the order of admission."""

    @abstractmethod
    def push(self, request: "Request") -> None:
        """Add a new request."""

    @abstractmethod
    def push_front(self, request: "Request") -> None:
        """Put back a request that had been taken out: before everyone who never was."""

    @abstractmethod
    def peek(self) -> "Request":
        """Return the next request without removing it."""

    @abstractmethod
    def remove(self, request: "Request") -> None:
        """Take one request out, wherever it stands."""


class FCFSQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator["Request"]:
        return iter(self._requests.values())

    def push(self, request: "Request") -> None:
        """Add a new request at the end."""
        self._requests[request.request_id] = request

    def push_front(self, request: "Request") -> None:
        """Put a request in front of all others."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> "Request":
        """Return the next request without removing it."""
        return next(iter(self._requests.values()))

    def remove(self, request: "Request") -> None:
        """Take one request out, wherever it stands."""
        del self._requests[request.request_id]


type Urgency = tuple[int, float, str]
"""Sort key of the priority policy; smaller goes first."""


def urgency(request: "Request") -> Urgency:
    """Return a request's place in the priority policy: by priority, then by arrival."""
    return request.priority, request.arrival_time, request.request_id


class PriorityQueue(RequestQueue):
    """By `urgency`; who comes back after a preemption stands where its priority puts it.

    A heap whose removed entries stay until they come to the top.
    """

    def __init__(self) -> None:
        # The counter keeps requests of equal urgency, one of them long gone, from being compared.
        self._heap: list[tuple[Urgency, int, Request]] = []
        self._pushes = itertools.count()
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator["Request"]:
        return iter(sorted(self._requests.values(), key=urgency))

    def push(self, request: "Request") -> None:
        """Add a request at the place of its priority."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (urgency(request), next(self._pushes), request))

    def push_front(self, request: "Request") -> None:
        """Put back a request; there is no front, only its priority."""
        self.push(request)

    def peek(self) -> "Request":
        """Return the most urgent request without removing it."""
        while True:
            request = self._heap[0][-1]
            if self._requests.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)

    def remove(self, request: "Request") -> None:
        """Take one request out, wherever it stands."""
        del self._requests[request.request_id]
        if self._heap[0][-1] is request:
            heapq.heappop(self._heap)


def make_request_queue(policy: str) -> RequestQueue:
    """Return the empty queue of a scheduling policy.

    Raises: ValueError for an unknown policy.
    """
    if policy not in SCHEDULING_POLICIES:
        raise ValueError(
            f"scheduling policy {policy!r} is unknown; choose one of "
            f"{', '.join(SCHEDULING_POLICIES)}."
        )
    return FCFSQueue() if policy == "fcfs" else PriorityQueue()
