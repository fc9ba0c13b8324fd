"""`StartupPhases`: how long each phase of loading took, for spans and for the log."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """One phase of the start-up.

    Attributes:
      name: such as "load weights".
      started: monotonic seconds.
      seconds: how long it took.
    """

    name: str
    started: float
    seconds: float


class StartupPhases:
    """Collects phases, which follow each other (mutable).

    Args:
      clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: list[Phase] = []

    @property
    def phases(self) -> Sequence[Phase]:
        """Those that have ended, in order."""
        return tuple(self._phases)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what happens inside as a phase, unless it fails."""
        started = self._clock()
        yield
        self._phases.append(Phase(name, started, self._clock() - started))

    def table(self) -> str:
        """Return a line for each phase: name, seconds, share of all."""
        total = sum(phase.seconds for phase in self._phases)
        width = max((len(phase.name) for phase in self._phases), default=0)
        lines = [f"Ready in {total:.1f} s:"]
        for name, _, seconds in self._phases:
            share = seconds / total if total else 0.0
            lines.append(f"  {name:<{width}} {seconds:8.1f} s {share:5.0%}")
        return "\n".join(lines)
