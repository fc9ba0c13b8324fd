"""`choose_backends`: which implementations of attention and of matrix products an engine uses."""

import dataclasses
import logging

from paged.attention import unsupported
from paged.attention_call import AttentionCall
from paged.backends import FASTEST_ATTENTION, resolve_backend
from paged.models.config import ModelConfig
from paged.native.library import load_library, resolve_linear_backend
from paged.scheduler.config import FP8_DTYPES, EngineConfig, StepLimits

logger = logging.getLogger(__name__)


def choose_backends(
    config: EngineConfig, model: ModelConfig, platform: str, *, progress: bool = False
) -> EngineConfig:
    """Return `config` with backends that serve every layer of a model; never "auto".

    On a CPU this builds and loads the native kernels, unless XLA is asked for. Where "auto" has to
    do without them, a warning says why.

    Args:
      config: settings in which everything else is resolved.
      model: shape of what one device computes.
      platform: a JAX platform name, see `paged.backends.current_platform`.
      progress: show a bar on standard error while compiling.

    Raises:
      ValueError: if a named backend cannot be had; the message gives the reason.
    """
    if platform == "cpu" and config.tensor_parallel_size > 1:
        config = _without_native(config)
    return dataclasses.replace(
        config,
        attention_backend=_attention_backend(config, model, platform, progress=progress),
        linear_backend=resolve_linear_backend(
            config.linear_backend,
            platform,
            config.dtype,
            cache_dir=config.native_cache_dir,
            progress=progress,
        ),
    )


def _without_native(config: EngineConfig) -> EngineConfig:
    """Return settings for several devices on a CPU, which the native kernels do not know of."""
    for name in ("attention_backend", "linear_backend"):
        if getattr(config, name) == "native":
            raise ValueError(
                f"{name}='native' serves one device, but tensor_parallel_size="
                f"{config.tensor_parallel_size}; use 'xla' or 'auto', or tensor_parallel_size=1."
            )
    if "auto" in (config.attention_backend, config.linear_backend):
        logger.warning(
            "Attention and linear layers run on XLA, which is slower: the native CPU kernels serve "
            "one device, and tensor_parallel_size=%d.",
            config.tensor_parallel_size,
        )
    chosen = {"auto": "xla"}
    return dataclasses.replace(
        config,
        attention_backend=chosen.get(config.attention_backend, config.attention_backend),
        linear_backend=chosen.get(config.linear_backend, config.linear_backend),
    )


def kv_element_type(kv_cache_dtype: str) -> str:
    """Return the element type that a resolved `EngineConfig.kv_cache_dtype` stands for."""
    return FP8_DTYPES.get(kv_cache_dtype, kv_cache_dtype)


def _attention_backend(
    config: EngineConfig, model: ModelConfig, platform: str, *, progress: bool
) -> str:
    requested, missing = config.attention_backend, None
    if platform == "cpu" and requested in ("auto", "native"):
        missing = load_library(config.native_cache_dir, progress=progress)
    if requested == "native" and missing is not None:
        raise ValueError(f"attention_backend='native' is unavailable: {missing}; or use 'auto'.")
    calls = _calls(config, model)

    def first_reason(name: str) -> str | None:
        return next(filter(None, (unsupported(name, call) for call in calls)), None)

    try:
        resolved = resolve_backend(
            requested, platform, unsupported=first_reason, fastest=FASTEST_ATTENTION
        )
    except NotImplementedError as error:
        raise ValueError(f"attention_backend: {error}") from None
    if platform == "cpu" and requested == "auto" and resolved != "native":
        logger.warning(
            "Attention runs on XLA, which is slower: %s. attention_backend=xla silences this.",
            missing or first_reason("native"),
        )
    return resolved


def _calls(config: EngineConfig, model: ModelConfig) -> list[AttentionCall]:
    """Return what is static about attention in the layers, without repetitions."""
    return [
        AttentionCall(
            num_tokens=StepLimits.of(config).max_num_batched_tokens,
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            q_dtype=config.dtype,
            kv_cache_dtype=kv_element_type(config.kv_cache_dtype),
            sliding_window=window,
            soft_cap=model.attention_soft_cap,
            has_sinks=model.attention_sinks,
            num_planes=model.kv_planes,
        )
        for window in dict.fromkeys(model.layer_windows)
    ]
