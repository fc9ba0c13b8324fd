"""`ArraySource`: a checkpoint of arrays in memory."""

from dataclasses import dataclass

import numpy as np


@dataclass
class ArraySource:
    """A `TensorSource` of arrays, which knows whether it was closed."""

    tensors: dict[str, np.ndarray]
    is_closed: bool = False

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def close(self) -> None:
        self.is_closed = True
