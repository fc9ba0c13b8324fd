"""Angles of the rotary embedding and its scaling variants; float32 whatever the model is.

Frequencies depend on the config alone, never on the lengths in a batch: keys are rotated once,
when they enter the cache, so a frequency that moved later would not match them any more.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paged.models.rope_config import RopeConfig


def rope_cos_sin(
    positions: Int[Array, "num_tokens"], config: RopeConfig, head_dim: int
) -> tuple[Float[Array, "num_tokens half_dim"], Float[Array, "num_tokens half_dim"]]:
    """Return cosine and sine of every token's angles, `[num_tokens, rotary_dim // 2]` float32.

    Computed once per step and shared by layers; the attention factor is included.
    """
    # float32: bfloat16 cannot represent every integer above 256, and these are positions.
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(config, head_dim)[None]
    factor = attention_factor(config)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Return radians per position of each feature pair that is rotated, float32 `[pairs]`.

    "dynamic" is evaluated at the longest context it is made for, `factor` times the original: the
    reference formula follows the current length, which a KV cache cannot, and vLLM fixes the same
    length. Results for short prompts therefore differ from a cache-free reference. "longrope" is
    that of the longest context that is served, for the same reason.

    Source: arXiv:2104.09864 (default), arXiv:2306.15595 (linear), arXiv:2309.00071 (dynamic, yarn),
    arXiv:2407.21783 (llama3), arXiv:2402.13753 (longrope), and transformers for what the papers
    leave open.
    """
    theta, head_dim = config.theta, config.rotary_dim(head_dim)
    if config.kind == "dynamic":
        growth = config.factor * config.factor - (config.factor - 1)
        theta *= growth ** (head_dim / (head_dim - 2))
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if config.kind == "linear":
        frequencies = frequencies / config.factor
    elif config.kind == "llama3":
        frequencies = _llama3(frequencies, config)
    elif config.kind == "yarn":
        frequencies = _yarn(frequencies, config, head_dim)
    elif config.kind == "longrope":
        assert config.context_length is not None, config
        is_long = config.context_length > _original_length(config)
        frequencies = frequencies / np.array(config.long_factor if is_long else config.short_factor)
    return frequencies.astype(np.float32)


def attention_factor(config: RopeConfig) -> float:
    """Return the factor on cosine and sine; 1 for every kind but "yarn" and "longrope"."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        if config.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(config.factor) / math.log(_original_length(config)))
    if config.mscale is not None and config.mscale_all_dim is not None:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Slow long wavelengths by `factor`, keep short ones, and blend linearly in between."""
    turns = _original_length(config) * frequencies / (2 * math.pi)  # over the original context
    band = config.high_freq_factor - config.low_freq_factor
    kept = np.clip((turns - config.low_freq_factor) / band, 0, 1)
    return np.asarray(kept * frequencies + (1 - kept) * frequencies / config.factor)


def _yarn(frequencies: np.ndarray, config: RopeConfig, head_dim: int) -> np.ndarray:
    """Keep pairs that turn often over the original context, interpolate those that turn rarely."""

    def pair_that_turns(turns: float) -> float:
        wavelength = _original_length(config) / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The bound is head_dim - 1, not half of it: a slip of the reference that checkpoints rely on.
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    slowed = frequencies / config.factor
    return np.asarray(frequencies * (1 - interpolated) + slowed * interpolated)


def _original_length(config: RopeConfig) -> int:
    assert config.original_max_position_embeddings is not None, config
    return config.original_max_position_embeddings
