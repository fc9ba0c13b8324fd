"""`WeightUpdates`: new parameters, at once or when the requests before them have ended."""

from collections.abc import Callable
from typing import Any, Literal

type InFlight = Literal["keep", "wait", "abort"]
"""What becomes of unfinished requests when the parameters change.

"keep": they keep their tokens and go on; their keys and values are computed again. "wait": they
end with the old parameters first, and later requests wait. "abort": they end at once.
"""

IN_FLIGHT: tuple[InFlight, ...] = ("keep", "wait", "abort")


class WeightUpdates:
    """Changes parameters between steps, and holds what comes behind a change that waits.

    Used by the engine thread alone.

    Args:
      apply: changes the parameters; raises ValueError, before anything has changed, if they do not
        fit.
      abort_all: ends all unfinished requests.
    """

    def __init__(self, apply: Callable[[Any], None], abort_all: Callable[[], None]) -> None:
        self._apply = apply
        self._abort_all = abort_all
        self._waiting: Callable[[], None] | None = None
        self._held: dict[str, Callable[[], None]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a change waits for requests to end."""
        return self._waiting is not None

    def update(
        self, params: Any, in_flight: InFlight, done: Callable[[ValueError | None], None]
    ) -> None:
        """Change the parameters now or later.

        Args:
          params: the new ones.
          in_flight: what becomes of unfinished requests.
          done: called when they have changed, or with the reason why they will not.
        """
        if self._waiting is not None:
            done(ValueError("Another update_params(in_flight='wait') waits; await it first."))
            return

        def change() -> None:
            refusal: ValueError | None = None
            try:
                self._apply(params)
            except ValueError as error:
                refusal = error
            done(refusal)

        if in_flight == "wait":
            self._waiting = change
            return
        if in_flight == "abort":
            self._abort_all()
        change()

    def add(self, request_id: str, add: Callable[[], None]) -> None:
        """Add a request by calling `add`, once no change waits."""
        if self._waiting is None:
            add()
        else:
            self._held[request_id] = add

    def let_go(self, request_id: str) -> None:
        """Add a request now if it is held: it is to be aborted, which its consumer hears of."""
        add = self._held.pop(request_id, None)
        if add is not None:
            add()

    def apply_waiting(self) -> None:
        """Make the change that waits, if there is one, then add what was held, in order."""
        change, self._waiting = self._waiting, None
        held, self._held = self._held, {}
        if change is not None:
            change()
        for add in held.values():
            add()
