"""`TraceRequest` and `Trace`: what was asked and when; content is named, never spelt out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

type Segment = tuple[str | int, int]
"""A content's name and how many of its leading tokens: equal names mean equal tokens."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
      prompt: segments that make up the prompt, each of at least one token.
      output_tokens: tokens it generates, at least 1.
      arrival_seconds: when it arrives, counted from the start of the trace.
      output: name of the generated content, so that a later prompt can repeat it as a segment;
        None if nothing ever does.
      priority: lower is served earlier where the scheduling policy looks at it.
      pass_index: the pass over the data that it belongs to; figures are also given per pass.
      session: the conversation it belongs to, for readers of the trace.
    """

    prompt: tuple[Segment, ...]
    output_tokens: int = 1
    arrival_seconds: float = 0.0
    output: str | int | None = None
    priority: int = 0
    pass_index: int = 0
    session: str | int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum([num_tokens for _, num_tokens in self.prompt])


class Trace:
    """A named sequence of requests that can be read more than once and is never held in memory.

    Args:
      name: what tables and plots call it.
      generate: starts a new iterator over the same requests, earliest arrival first.
      num_requests: how many there are, None if unknown; for progress bars.
      has_arrivals: whether `arrival_seconds` mean anything.
    """

    def __init__(
        self,
        name: str,
        generate: Callable[[], Iterator[TraceRequest]],
        num_requests: int | None = None,
        *,
        has_arrivals: bool = False,
    ) -> None:
        self.name = name
        self.num_requests = num_requests
        self.has_arrivals = has_arrivals
        self._generate = generate

    def __iter__(self) -> Iterator[TraceRequest]:
        return self._generate()

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, num_requests={self.num_requests})"
