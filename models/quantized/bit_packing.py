"""Small integers out of the int32 words of checkpoints, by NumPy."""

import numpy as np


def unpack_last(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of words `[..., n]`, uint8 `[..., n * 32 / bits]`, low bits first."""
    as_bytes = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return as_bytes
    codes = np.empty((*as_bytes.shape, 2), np.uint8)
    codes[..., 0], codes[..., 1] = as_bytes & 15, as_bytes >> 4
    return codes.reshape(*as_bytes.shape[:-1], -1)


def unpack_first(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of words `[n, m]` as uint8 `[m, n * 32 / bits]`: transposed, low first."""
    return unpack_last(words.T, bits)
