"""`StepRows`, `StepUpdates`: the rows of a step as columns, read as rows where speed is no matter.

A step of 256 decodes would make 256 tuples on its way to the device and as many on its way back,
which costs more than all that is decided about them (docs/decisions/0025). So whoever loops over
every row of every step uses the columns; everybody else sees a sequence of tuples.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from paged.scheduler.output import FinishReason, ScheduledRequest
from paged.scheduler.request import Request


class StepRows(Sequence[ScheduledRequest]):
    """What each scheduled request computes in a step; entry i of every column is row i.

    Attributes:
      requests, starts, counts, samples, inputs_in_flight: the fields of `ScheduledRequest`, of
        which `counts` is `num_tokens`.
    """

    __slots__ = ("counts", "inputs_in_flight", "requests", "samples", "starts")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.inputs_in_flight: list[bool] = []

    @classmethod
    def of(cls, rows: Iterable[ScheduledRequest]) -> "StepRows":
        """Return rows as columns; the same object if they are columns already."""
        if isinstance(rows, StepRows):
            return rows
        columns = cls()
        for row in rows:
            columns.append(*row)
        return columns

    def append(
        self, request: Request, start: int, count: int, samples: bool, input_in_flight: bool
    ) -> None:
        """Add a row."""
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        self.inputs_in_flight.append(input_in_flight)

    def extend(self, rows: "StepRows") -> None:
        """Add all rows of another step part."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(rows, name))

    def pop(self, index: int) -> ScheduledRequest:
        """Take a row out and return it."""
        row = self[index]
        for name in self.__slots__:
            del getattr(self, name)[index]
        return row

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScheduledRequest]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRequest | list[ScheduledRequest]:
        if isinstance(index, slice):
            return list(self)[index]
        return ScheduledRequest(
            self.requests[index],
            self.starts[index],
            self.counts[index],
            self.samples[index],
            self.inputs_in_flight[index],
        )

    def __iter__(self) -> Iterator[ScheduledRequest]:
        columns = (self.requests, self.starts, self.counts, self.samples, self.inputs_in_flight)
        return map(ScheduledRequest._make, zip(*columns, strict=True))


class RequestUpdate(NamedTuple):
    """What one step added to a request; the new tokens are already in its output.

    Attributes:
      request: the request; a finished one has its `finish_reason` and holds no blocks any more.
      row: its index in `SchedulerOutput.scheduled`, hence its row of the log probabilities.
      new_token_ids: tokens sampled in this step.
      is_first_token: whether they are the request's first.
      seconds_since_last_token: time since the token before them, 0 if they are the first.
      finish_reason: why the request ended with them, None if it goes on.
      stop_reason: the stop token id that ended it, if the caller listed one.
    """

    request: Request
    row: int
    new_token_ids: tuple[int, ...]
    is_first_token: bool
    seconds_since_last_token: float
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StepUpdates(Sequence[RequestUpdate]):
    """The requests that got a token in a step, in batch order; entry i of each column is one.

    Attributes:
      rows: index in `SchedulerOutput.scheduled`.
      requests: the request.
      token_ids: the token that was sampled for it.
      gaps: seconds since its token before, 0 if this is the first.
      firsts: indices of the entries whose token is the request's first.
      ended: indices of the entries whose request has ended with it.
      replaced: by index, the new tokens of the entries that have not exactly one: forced tokens may
        follow it, and one that is not allowed does not count.
    """

    __slots__ = ("ended", "firsts", "gaps", "replaced", "requests", "rows", "token_ids")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.requests: list[Request] = []
        self.token_ids: list[int] = []
        self.gaps: list[float] = []
        self.firsts: list[int] = []
        self.ended: list[int] = []
        self.replaced: dict[int, tuple[int, ...]] = {}

    @property
    def num_tokens(self) -> int:
        """New tokens of all entries."""
        return len(self.requests) + sum(len(tokens) - 1 for tokens in self.replaced.values())

    def new_token_ids(self, index: int) -> tuple[int, ...]:
        """Return the new tokens of an entry."""
        if self.replaced and (tokens := self.replaced.get(index)) is not None:
            return tokens
        return (self.token_ids[index],)

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> RequestUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestUpdate]: ...
    def __getitem__(self, index: int | slice) -> RequestUpdate | list[RequestUpdate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        request = self.requests[index]
        has_ended = index in self.ended
        return RequestUpdate(
            request,
            self.rows[index],
            self.new_token_ids(index),
            index in self.firsts,
            self.gaps[index],
            request.finish_reason if has_ended else None,
            request.stop_reason if has_ended else None,
        )
