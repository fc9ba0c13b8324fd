"""`StepLog`: what every step of a simulation did, in columns."""

from array import array

import numpy as np

COLUMNS = (
    ("start_seconds", "d"),
    ("seconds", "d"),
    ("num_tokens", "q"),
    ("num_running", "q"),
    ("num_waiting", "q"),
    ("used_blocks", "q"),
    ("wasted_slots", "q"),
    ("num_preempted", "q"),
)
"""Name and type code of each column; `used_blocks` are referenced, `wasted_slots` the token slots
in them that hold no token."""


class StepLog:
    """One row per step (mutable while the simulation runs); 64 bytes each.

    Args:
      num_usable_blocks, block_size: of the pool.
    """

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self.num_usable_blocks = num_usable_blocks
        self.block_size = block_size
        self._columns: tuple[array[float] | array[int], ...] = tuple(
            array(code) for _, code in COLUMNS
        )
        self._appends = [column.append for column in self._columns]

    def __len__(self) -> int:
        return len(self._columns[0])

    def append(self, *row: float) -> None:
        """Add a step; values in the order of `COLUMNS`."""
        for append, value in zip(self._appends, row, strict=True):
            append(value)  # type: ignore[arg-type]

    def column(self, name: str) -> np.ndarray:
        """Return a column by its name in `COLUMNS`, `[num_steps]`."""
        for index, (column, code) in enumerate(COLUMNS):
            if column == name:
                dtype = np.float64 if code == "d" else np.int64
                return np.array(self._columns[index], dtype)
        raise KeyError(f"{name!r} is no column; there are {', '.join(n for n, _ in COLUMNS)}.")

    def mean_usage(self) -> float:
        """Return the share of the pool's blocks that were referenced, averaged over time."""
        return _weighted(self.column("used_blocks") / self.num_usable_blocks, self)

    def mean_waste(self) -> float:
        """Return the share of slots in referenced blocks that held no token, averaged over time."""
        used = self.column("used_blocks") * self.block_size
        wasted = self.column("wasted_slots")
        return _weighted(np.where(used > 0, wasted / np.maximum(used, 1), 0.0), self)


def _weighted(values: np.ndarray, log: StepLog) -> float:
    seconds = log.column("seconds")
    total = float(seconds.sum())
    return float((values * seconds).sum()) / total if total else 0.0
