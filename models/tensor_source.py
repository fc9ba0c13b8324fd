"""`TensorSource`: named tensors of a checkpoint, in whatever files they are."""

from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Named tensors of a checkpoint, under Hugging Face names and in that layout."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""

    def read(self, name: str) -> np.ndarray:
        """Return one tensor: a read-only view of a file, or a writable array for the caller."""

    def close(self) -> None:
        """Let go of the files; nothing can be read any more."""
