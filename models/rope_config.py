"""`RopeConfig`: the rotary embedding that a model's configuration describes, and how it is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paged.models.config_values import (
    optional_float,
    positive_float,
    positive_floats,
    positive_int,
)
from paged.models.errors import CheckpointError, UnsupportedModelError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Rotary embeddings that `models/rope.py` implements."""

# What early Phi-3 checkpoints call "longrope".
_OTHER_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its scaling.

    Attributes:
      kind: one of `ROPE_KINDS`.
      theta: base of the frequencies.
      factor: scaling factor of every kind but "default"; of "longrope", by how much the context
        was stretched.
      original_max_position_embeddings: context length before scaling ("dynamic", "llama3", "yarn",
        "longrope").
      low_freq_factor, high_freq_factor: wavelength bounds of "llama3".
      beta_fast, beta_slow: rotation bounds of "yarn".
      attention_factor: factor on cos and sin of "yarn" and "longrope"; None computes it from
        `factor`.
      mscale, mscale_all_dim: DeepSeek's correction of the "yarn" attention factor.
      truncate: whether "yarn" rounds its correction range to whole dimensions.
      partial_rotary_factor: part of a head's features, the first, that is rotated.
      short_factor, long_factor: what "longrope" divides each frequency by, for contexts up to the
        original length and beyond it.
      context_length: longest context that is served, which decides between the two.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    context_length: int | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many features of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)


def read_rope(config: Mapping[str, Any], max_position_embeddings: int, head_dim: int) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters`, or `rope_scaling` and `rope_theta`.

    Raises:
      CheckpointError: if a key is missing or its value cannot be.
      UnsupportedModelError: if `models/rope.py` does not implement it.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError(
            "rope_parameters by layer type are not implemented for this architecture; only one "
            "for all layers is."
        )
    # Copied, with the keys that may also stand outside: the inner ones win.
    outside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    values = {key: config[key] for key in outside if key in config}
    values |= {key: value for key, value in scaling.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not implemented; supported: {', '.join(ROPE_KINDS)}."
        )
    rope = _READERS[kind](values, max_position_embeddings, head_dim)
    part = positive_float(values, "partial_rotary_factor", default=1.0)
    rope = replace(
        rope,
        theta=positive_float(values, "rope_theta", default=10000.0),
        partial_rotary_factor=part,
    )
    if part > 1 or rope.rotary_dim(head_dim) % 2 or not rope.rotary_dim(head_dim):
        raise UnsupportedModelError(
            f"partial_rotary_factor={part} of head_dim={head_dim} is not implemented; it must "
            "give an even number of features, at most all of them."
        )
    return rope


def _default(_values: Mapping[str, Any], _longest: int, _head_dim: int) -> RopeConfig:
    return RopeConfig()


def _linear(values: Mapping[str, Any], _longest: int, _head_dim: int) -> RopeConfig:
    return RopeConfig("linear", factor=positive_float(values, "factor"))


def _dynamic(values: Mapping[str, Any], longest: int, _head_dim: int) -> RopeConfig:
    return RopeConfig(
        "dynamic",
        factor=positive_float(values, "factor"),
        original_max_position_embeddings=_original(values, longest),
    )


def _llama3(values: Mapping[str, Any], longest: int, _head_dim: int) -> RopeConfig:
    factor = positive_float(values, "factor")
    low = positive_float(values, "low_freq_factor")
    high = positive_float(values, "high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"high_freq_factor={high} of the model's rope must exceed low_freq_factor={low}."
        )
    return RopeConfig(
        "llama3",
        factor=factor,
        original_max_position_embeddings=_original(values, longest),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(values: Mapping[str, Any], longest: int, _head_dim: int) -> RopeConfig:
    original = _original(values, longest)
    return RopeConfig(
        "yarn",
        # DeepSeek-style configs may give the two lengths instead of their ratio.
        factor=positive_float(values, "factor", default=longest / original),
        original_max_position_embeddings=original,
        beta_fast=positive_float(values, "beta_fast", default=32.0),
        beta_slow=positive_float(values, "beta_slow", default=1.0),
        attention_factor=optional_float(values, "attention_factor"),
        mscale=optional_float(values, "mscale"),
        mscale_all_dim=optional_float(values, "mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )


def _longrope(values: Mapping[str, Any], longest: int, head_dim: int) -> RopeConfig:
    original = _original(values, longest)
    part = positive_float(values, "partial_rotary_factor", default=1.0)
    num_pairs = int(head_dim * part) // 2
    return RopeConfig(
        "longrope",
        factor=positive_float(values, "factor", default=longest / original),
        original_max_position_embeddings=original,
        attention_factor=optional_float(values, "attention_factor"),
        short_factor=positive_floats(values, "short_factor", num_pairs),
        long_factor=positive_floats(values, "long_factor", num_pairs),
        context_length=longest,
    )


_READERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _original(values: Mapping[str, Any], longest: int) -> int:
    return positive_int(values, "original_max_position_embeddings", default=longest)
