"""`WaitingUpdate`: new parameters that wait until the requests before them have ended."""

from collections.abc import Callable
from typing import Literal

type InFlight = Literal["keep", "wait", "abort"]
"""What becomes of unfinished requests when the parameters change.

"keep": they keep their tokens and go on; their keys and values are computed again. "wait": they
end with the old parameters first, and later requests wait. "abort": they end at once.
"""

IN_FLIGHT: tuple[InFlight, ...] = ("keep", "wait", "abort")


class WaitingUpdate:
    """Holds what came after it; used by the engine thread alone.

    Args:
      apply: changes the parameters.
    """

    def __init__(self, apply: Callable[[], None]) -> None:
        self._apply = apply
        self._held: dict[str, Callable[[], None]] = {}

    def hold(self, request_id: str, add: Callable[[], None]) -> None:
        """Keep a request, given by what adds it to the engine."""
        self._held[request_id] = add

    def let_go(self, request_id: str) -> None:
        """Add a request now if it is held: it is to be aborted, which its consumer hears of."""
        add = self._held.pop(request_id, None)
        if add is not None:
            add()

    def apply(self) -> None:
        """Change the parameters, then add what was held, in order."""
        self._apply()
        for add in self._held.values():
            add()
