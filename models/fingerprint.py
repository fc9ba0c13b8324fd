"""`weights_fingerprint`: tells checkpoints apart without reading all of their bytes again."""

import hashlib
from typing import Any

import jax
import numpy as np

_SAMPLES = 256


def weights_fingerprint(params: Any) -> str:
    """Return a digest of the parameters: their structure, shapes, dtypes and a sample of values.

    For names of stored keys and values, which another set of weights must not find. Every tensor
    gives 256 evenly spaced elements, so any training step shows.

    Args:
      params: tree of arrays.
    """
    digest = hashlib.sha256()
    leaves, structure = jax.tree.flatten(params)
    digest.update(str(structure).encode())
    for leaf in leaves:
        digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        stride = max(1, leaf.size // _SAMPLES)
        digest.update(np.asarray(leaf.reshape(-1)[::stride]).tobytes())
    return digest.hexdigest()
