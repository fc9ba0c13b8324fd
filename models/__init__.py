"""Flax models, checkpoints and sampling: knows arrays and parameters, never requests.

For programs of one's own (training, scoring), resolved on first use:

    graphdef, params, config = paged.models.load("path/to/model", dtype="float32")
    logits = paged.models.dense_logits(graphdef, params, token_ids)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged.models.forward import dense_forward, dense_logits, token_logprobs
    from paged.models.library import LoadedModel, load

_LAZY = {
    "LoadedModel": "paged.models.library",
    "dense_forward": "paged.models.forward",
    "dense_logits": "paged.models.forward",
    "load": "paged.models.library",
    "token_logprobs": "paged.models.forward",
}

__all__ = ["LoadedModel", "dense_forward", "dense_logits", "load", "token_logprobs"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'paged.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
