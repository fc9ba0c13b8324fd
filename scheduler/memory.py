"""`size_kv_cache`: how many KV blocks the devices have room for beside weights and steps."""

import dataclasses
import logging
from collections.abc import Sequence

from paged.backends import DeviceMemory, current_platform
from paged.block_copy import MAX_STAGED_BYTES
from paged.cache_groups import CacheGroup
from paged.kv_cache import KVCacheSpec
from paged.models.config import ModelConfig
from paged.models.lora_arrays import lora_bytes
from paged.models.lora_layers import AdaptableModel
from paged.models.tensor_parallel import TensorParallel
from paged.models.weight_bytes import count_weight_bytes
from paged.scheduler.artifacts import check_artifact_fits
from paged.scheduler.backend_choice import kv_element_type
from paged.scheduler.capacity import GIB, MemoryBudget, available_kv_bytes
from paged.scheduler.config import EngineConfig, StepLimits
from paged.scheduler.placement import Placement
from paged.scheduler.tiers.manager import MAX_INFLIGHT_BYTES

logger = logging.getLogger(__name__)


def size_kv_cache(spec: KVCacheSpec, config: EngineConfig, placement: Placement) -> int:
    """Return the number of KV blocks, the null block included.

    Args:
      spec: what a block holds on one device.
      config: resolved settings.
      placement: the devices.
    """
    part = placement.split.part
    if config.num_gpu_blocks_override is not None:
        if config.artifact is not None:
            weights = weight_bytes(config, part)
            check_artifact_fits(spec, config.num_gpu_blocks_override, weights)
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return spec.blocks_that_fit(config.kv_cache_memory_bytes)
    budget = memory_budget(
        config, placement.split, placement.memory(), is_host=current_platform() == "cpu"
    )
    available = available_kv_bytes(budget, config.gpu_memory_utilization)
    logger.info("Available KV cache memory: %.2f GiB", available / GIB)
    return spec.blocks_that_fit(available)


def memory_budget(
    config: EngineConfig, split: TensorParallel, memory: DeviceMemory, *, is_host: bool
) -> MemoryBudget:
    """Return what each device has, and what weights and steps take of it.

    Args:
      config: resolved settings.
      split: the model's parts.
      memory: of each device.
      is_host: the devices are the host's CPU.
    """
    # The head's logits are gathered before they are sampled from: all are on every device.
    widest = dataclasses.replace(split.part, vocab_size=split.config.vocab_size)
    return MemoryBudget(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        weight_bytes=weight_bytes(config, split.part) + adapter_bytes(config, split.part),
        activation_bytes=activation_bytes(config, widest) + staging_bytes(config),
        shared_with_host=is_host,
        num_devices=split.size,
    )


def weight_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes that the parameters of `model` will take."""
    return count_weight_bytes(model, dtype=config.dtype, quantization=config.quantization).total


def adapter_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes that the slots of LoRA adapters of `model` will take."""
    loras = config.lora_config
    if loras is None:
        return 0
    return lora_bytes(
        AdaptableModel.of(model, loras.target_modules).layers,
        max_loras=loras.max_loras,
        max_rank=loras.max_lora_rank,
        dtype=loras.lora_dtype,
    )


def activation_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return an upper bound on the temporaries of the largest step.

    The widest moments are the MLP (gate, up and their product for every token), the head (float32
    logits of every sequence, a few copies of them while sampling), and with latent attention its
    queries and outputs, of the width of the cache for every head; all are counted, although they
    are never alive together.
    """
    limits = StepLimits.of(config)
    mlp_bytes = limits.max_num_batched_tokens * (3 * model.intermediate_size) * 4
    residual_bytes = limits.max_num_batched_tokens * (6 * model.hidden_size) * 4
    logits_bytes = limits.max_num_seqs * model.vocab_size * 4 * 4
    fixed = mlp_bytes + residual_bytes + logits_bytes + _latent_bytes(config, model)
    return fixed + _widened_bytes(config, model) + _adapted_bytes(config, model)


def _latent_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return what latent attention has at once: queries in three forms, and outputs."""
    if model.latent is None:
        return 0
    width = model.num_q_heads * model.head_dim
    return StepLimits.of(config).max_num_batched_tokens * (4 * width) * 4


def _widened_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return an upper bound on a quantised weight that a product widens, one after the other."""
    if config.quantization is None:
        return 0
    return 4 * model.hidden_size * max(model.intermediate_size, model.num_q_heads * model.head_dim)


def _adapted_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return an upper bound on what adapters add to the temporaries of a linear layer."""
    loras = config.lora_config
    if loras is None:
        return 0
    widest = max(model.intermediate_size, model.hidden_size, model.num_q_heads * model.head_dim)
    columns = 2 * widest + 2 * loras.max_loras * loras.max_lora_rank
    return StepLimits.of(config).max_num_batched_tokens * columns * 4


def staging_bytes(config: EngineConfig) -> int:
    """Return the most device memory of blocks on their way to and from the tiers below."""
    if not config.kv_offloading_size:
        return 0
    # In each direction what may be on its way, and one program's output that is not counted yet.
    return 2 * MAX_INFLIGHT_BYTES + MAX_STAGED_BYTES


def kv_cache_spec(
    config: EngineConfig, model: ModelConfig, groups: Sequence[CacheGroup]
) -> KVCacheSpec:
    """Return what a block holds on a device that computes `model`; `config` is resolved."""
    return KVCacheSpec(
        num_layers=max(len(group.layers) for group in groups),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=kv_element_type(config.kv_cache_dtype),
        num_planes=model.kv_planes,
    )
