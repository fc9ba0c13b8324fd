"""`Mxfp4Half`: values and scales out of GGUF's blocks of MXFP4, in the layout of gpt-oss.

A block of 32 weights is a byte of scale and 16 bytes of elements there; byte i holds elements i, in
its lower bits, and i + 16. In gpt-oss' own checkpoints it holds the neighbours 2 i and 2 i + 1.

Source: ggml, `block_mxfp4` in `ggml-common.h`.
"""

from enum import Enum

import numpy as np

from paged.models.host_memory import empty_array
from paged.models.mxfp4_weight import GROUP_SIZE

_BYTES = GROUP_SIZE // 2


class Mxfp4Half(Enum):
    """One of the two tensors that a tensor of blocks becomes; its name ends so."""

    BLOCKS = "blocks"
    SCALES = "scales"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this half of a weight `[..., num_inputs]`."""
        groups = (*shape[:-1], shape[-1] // GROUP_SIZE)
        return (*groups, _BYTES) if self is Mxfp4Half.BLOCKS else groups

    def read(self, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return this half, uint8.

        Args:
          data: all blocks, uint8.
          shape: of the weight, `[..., num_inputs]`.
        """
        stored = data.reshape(-1, 1 + _BYTES)
        if self is Mxfp4Half.SCALES:
            return stored[:, 0].reshape(self.shape(shape)).copy()
        out = empty_array((len(stored), _BYTES), np.dtype(np.uint8))
        # Elements 0 to 15 are in lower bits, two neighbours of them in neighbouring bytes.
        low, high = out[:, :8], out[:, 8:]
        pairs = stored[:, 1:].reshape(-1, 8, 2)
        np.bitwise_or(pairs[..., 0] & 15, pairs[..., 1] << 4, out=low)
        np.bitwise_or(pairs[..., 0] >> 4, pairs[..., 1] & 240, out=high)
        return out.reshape(self.shape(shape))
