"""`resolve_config`: every default filled in, and what follows from settings and model alone.

Nothing is loaded here, so a plan for a GPU that is not here asks the same functions.
"""

import dataclasses

from paged.backends import current_device, current_platform, device_memory
from paged.cache_groups import CacheGroup, group_layers, one_group
from paged.models.config import ModelConfig
from paged.models.quantization import resolve_quantization
from paged.models.weights import resolve_dtype
from paged.scheduler.backend_choice import choose_backends
from paged.scheduler.buckets import MIN_ROWS, BucketTable
from paged.scheduler.capacity import GIB
from paged.scheduler.config import EngineConfig, StepLimits
from paged.scheduler.placement import split_of

# Defaults by platform, as the reference chooses them: (sequences, tokens of a step).
_CPU_LIMITS = (128, 2048)
_SMALL_GPU_LIMITS = (256, 2048)
_LARGE_GPU_LIMITS = (1024, 8192)
_LARGE_GPU_BYTES = 70 * GIB

# Of a full step, in "interactivity": what one prompt may take while others wait for their tokens.
_INTERACTIVE_PARTS = 8


def resolve_config(
    config: EngineConfig, model: ModelConfig, *, progress: bool = False
) -> EngineConfig:
    """Return `config` with every default filled in for this model and device.

    Args:
      config: settings.
      model: shape of the model.
      progress: show a bar on standard error if native kernels have to be compiled.

    Raises:
      ValueError: if `max_model_len` exceeds what the model was made for, if a step is too small
        for it although prompts may not be computed in parts, or if native kernels are asked for
        and cannot be had.
    """
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {longest} positions the model was made "
            "for; lower it."
        )
    platform = current_platform()
    factor = 2 if config.performance_mode == "throughput" else 1
    default_seqs, default_tokens = (factor * limit for limit in _default_limits(platform))
    max_num_seqs = config.max_num_seqs
    max_num_batched_tokens = config.max_num_batched_tokens
    longest_chunk = 1 if config.enable_chunked_prefill else max_model_len
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(default_tokens, max_num_seqs or 0, longest_chunk)
    if max_num_batched_tokens < longest_chunk:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} must be at least max_model_len="
            f"{max_model_len} without chunked prefill; raise it, lower max_model_len, or set "
            "enable_chunked_prefill."
        )
    if max_num_seqs is None:
        max_num_seqs = min(default_seqs, max_num_batched_tokens)
    dtype = resolve_dtype(config.dtype, model)
    threshold = config.long_prefill_token_threshold
    if config.performance_mode == "interactivity" and config.enable_chunked_prefill:
        threshold = threshold or max(1, max_num_batched_tokens // _INTERACTIVE_PARTS)
    kv_cache_dtype = {"auto": dtype, "fp8": "fp8_e4m3"}.get(
        config.kv_cache_dtype, config.kv_cache_dtype
    )
    resolved = dataclasses.replace(
        config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=threshold,
        dtype=dtype,
        quantization=resolve_quantization(config.quantization, model.quantization_method),
        kv_cache_dtype=kv_cache_dtype,
        lora_dtype=dtype if config.lora_dtype == "auto" else config.lora_dtype,
        async_scheduling=(
            platform != "cpu" if config.async_scheduling is None else config.async_scheduling
        ),
    )
    if config.artifact is not None:
        return resolved  # its programs have their backends inside
    return choose_backends(resolved, split_of(config, model).part, platform, progress=progress)


def _default_limits(platform: str) -> tuple[int, int]:
    if platform == "cpu":
        return _CPU_LIMITS
    return gpu_limits(device_memory().total_bytes, current_device().device_kind)


def gpu_limits(total_bytes: int, device_kind: str) -> tuple[int, int]:
    """Return the default sequences and tokens of a step on a GPU, by its memory and its name."""
    is_large = total_bytes >= _LARGE_GPU_BYTES and "a100" not in device_kind.lower()
    return _LARGE_GPU_LIMITS if is_large else _SMALL_GPU_LIMITS


def cache_groups(config: EngineConfig, model: ModelConfig) -> tuple[CacheGroup, ...]:
    """Return which layers of a model share block tables."""
    if config.disable_hybrid_kv_cache_manager:
        return one_group(model.num_layers)
    return group_layers(model.layer_windows)


def make_bucket_table(config: EngineConfig) -> BucketTable:
    """Return the shapes of the steps of an engine whose defaults are resolved."""
    limits = StepLimits.of(config)
    return BucketTable(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        min_rows=1 if config.linear_backend == "native" else MIN_ROWS,
        is_fine=config.performance_mode == "interactivity",
    )
