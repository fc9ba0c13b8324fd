"""LLM inference in JAX on a paged KV cache.

    from paged import LLM, SamplingParams

    llm = LLM()  # the demo model, SmolLM2-135M-Instruct
    print(llm.generate("The capital of France is")[0].outputs[0].text)

Importing `paged` loads neither JAX nor a tokenizer: names are resolved on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from paged._version import __version__

if TYPE_CHECKING:
    from paged.attention import ragged_paged_attention
    from paged.kv_cache import KVCache, KVCacheSpec
    from paged.kv_write import write_kv
    from paged.scheduler.async_engine import AsyncEngine
    from paged.scheduler.engine import Engine
    from paged.scheduler.llm import LLM
    from paged.scheduler.lora_request import LoRARequest
    from paged.scheduler.output import CompletionOutput, RequestOutput
    from paged.scheduler.params import SamplingParams
    from paged.scheduler.structured.params import StructuredOutputs

# Name -> module. The names above the kernels are the one upward reference of this floor.
_LAZY = {
    "KVCache": "paged.kv_cache",
    "KVCacheSpec": "paged.kv_cache",
    "ragged_paged_attention": "paged.attention",
    "write_kv": "paged.kv_write",
    "AsyncEngine": "paged.scheduler.async_engine",
    "CompletionOutput": "paged.scheduler.output",
    "Engine": "paged.scheduler.engine",
    "LLM": "paged.scheduler.llm",
    "LoRARequest": "paged.scheduler.lora_request",
    "RequestOutput": "paged.scheduler.output",
    "SamplingParams": "paged.scheduler.params",
    "StructuredOutputs": "paged.scheduler.structured.params",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "KVCache",
    "KVCacheSpec",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "ragged_paged_attention",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'paged' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
