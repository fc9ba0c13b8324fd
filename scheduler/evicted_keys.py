"""`EvictedKeys`: which contents the prefix cache had and gave up, for as long as it matters."""

from collections.abc import Iterable


class EvictedKeys:
    """The latest keys that were evicted, up to a limit; a key that is cached again may stay.

    What was evicted and is asked for again is what more capacity would have kept; what never was
    cached would miss in any cache. Nothing else tells the two apart (ghost entries, as of ARC:
    Megiddo and Modha, FAST 2003).

    Args:
      limit: keys remembered; the oldest are forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: dict[bytes, None] = {}  # oldest first

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember keys that have just been evicted."""
        remembered = self._keys
        for key in keys:
            remembered.pop(key, None)
            remembered[key] = None
        while len(remembered) > self._limit:
            del remembered[next(iter(remembered))]

    def count_leading(self, keys: Iterable[bytes]) -> int:
        """Return how many of `keys`, from the first on, were evicted not long ago."""
        count = 0
        for key in keys:
            if key not in self._keys:
                break
            count += 1
        return count

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()
