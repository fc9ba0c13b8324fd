"""What an artifact's programs have inside them, and an `EngineConfig` that agrees with it."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from paged._version import __version__
from paged.backends import current_device, current_platform, device_memory
from paged.gpu.traits import describe
from paged.kv_cache import KVCacheSpec
from paged.models.artifact import Artifact
from paged.models.config import ModelConfig
from paged.models.executables import sources_digest
from paged.scheduler.capacity import GIB
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import CapacityError

# Settings that are inside the programs.
_COMPILED_IN = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "performance_mode",
    "num_gpu_blocks_override",
    "disable_hybrid_kv_cache_manager",
    "attention_backend",
    "linear_backend",
    "tensor_parallel_size",
    "enable_expert_parallel",
)


def artifact_settings(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """Return all that programs depend on, by name; `config` is resolved."""
    is_gpu = current_platform() == "gpu"
    return {
        "paged": f"{__version__} ({sources_digest()[:12]})",
        "jax": importlib.metadata.version("jax"),
        "device": f"sm_{describe(current_device()).compute_capability}" if is_gpu else "cpu",
        **{f"model.{name}": value for name, value in dataclasses.asdict(model).items()},
        **{name: getattr(config, name) for name in _COMPILED_IN},
    }


def agree_with_artifact(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return a config with the artifact's values where it leaves them open; resolved by that.

    Args:
      config: settings with `artifact`.
      model: shape of the model that is about to be loaded.

    Raises:
      ValueError: if the folder is no artifact, or was made for something else; names the first
        difference.
    """
    artifact = Artifact.open(str(config.artifact))
    if config.kv_cache_memory_bytes is not None:
        raise ValueError(
            "kv_cache_memory_bytes contradicts artifact, in which the number of blocks is fixed; "
            "leave it out, or give it to `paged compile`."
        )
    filled = dataclasses.replace(
        config, **{name: _agreed(artifact.settings, config, name) for name in _COMPILED_IN}
    )
    artifact.check(artifact_settings(filled, model))
    return filled


def check_artifact_fits(spec: KVCacheSpec, num_blocks: int, weight_bytes: int) -> None:
    """Raise unless the device has room for the blocks that an artifact was made for.

    Raises:
      CapacityError: if it has not.
    """
    memory, kv_bytes = device_memory(), num_blocks * spec.bytes_per_block
    if weight_bytes + kv_bytes > memory.free_bytes:
        raise CapacityError(
            f"the artifact was made for {num_blocks} KV blocks ({kv_bytes / GIB:.2f} GiB); with "
            f"weights of {weight_bytes / GIB:.2f} GiB they exceed the {memory.free_bytes / GIB:.2f}"
            " GiB that are free; free memory, or run `paged compile` with a smaller "
            "num_gpu_blocks_override."
        )


def _agreed(settings: Mapping[str, Any], config: EngineConfig, name: str) -> Any:
    """Return the artifact's value of a setting that is left open, else the config's."""
    here = getattr(config, name)
    if here in (None, "auto"):
        return settings.get(name)
    return "fp8_e4m3" if (name, here) == ("kv_cache_dtype", "fp8") else here
