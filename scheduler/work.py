"""`Work`: how long the engine worked on something that a request took part in."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.scheduler.request import Request


@dataclass(slots=True)
class Work:
    """Work of one kind (mutable); times are monotonic seconds.

    Attributes:
      started, ended: of the first and of the last step with such work.
      seconds: of all steps together; a step's time counts in full for each of its requests.
      count: steps.
    """

    started: float
    ended: float
    seconds: float = 0.0
    count: int = 0


def time_work[T](
    kind: str,
    requests: Callable[[], Iterable["Request"]],
    clock: Callable[[], float],
    function: Callable[[], T],
) -> T:
    """Call a function, note its time in `work` of all requests it was for, return its result.

    Args:
      kind: "host_copies" or "detokenize".
      requests: returns the requests, asked after the call.
      clock: monotonic seconds.
      function: does the work.
    """
    started = clock()
    result = function()
    ended = clock()
    for request in requests():
        work = request.work.setdefault(kind, Work(started, ended))
        work.ended = ended
        work.seconds += ended - started
        work.count += 1
    return result
