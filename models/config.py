"""`ModelConfig`: the numbers of an architecture, read from `config.json` or GGUF metadata.

What the engine does not implement is refused here, before any weight is read, with the reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from paged.models.errors import CheckpointError
from paged.models.quantized.checkpoint_format import CheckpointFormat
from paged.models.quantized.fields import UnsupportedQuantizationError
from paged.models.quantized.formats import read_quantization

DTYPES = ("bfloat16", "float16", "float32")
"""Element types that weights and activations may have."""

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Rotary embeddings that `models/rope.py` implements."""


class UnsupportedModelError(ValueError):
    """The checkpoint is valid but needs something this engine does not implement."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its scaling.

    Attributes:
      kind: one of "default", "linear", "dynamic", "llama3", "yarn".
      theta: base of the frequencies.
      factor: scaling factor of every kind but "default".
      original_max_position_embeddings: context length before scaling ("dynamic", "llama3", "yarn").
      low_freq_factor, high_freq_factor: wavelength bounds of "llama3".
      beta_fast, beta_slow: rotation bounds of "yarn".
      attention_factor: factor on cos and sin of "yarn"; None computes it from `factor`.
      mscale, mscale_all_dim: DeepSeek's correction of the "yarn" attention factor.
      truncate: whether "yarn" rounds its correction range to whole dimensions.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071.
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model; hashable, so it can be a static argument.

    Attributes:
      architecture: name in the registry, such as "LlamaForCausalLM".
      vocab_size, hidden_size, intermediate_size, num_layers: as in the checkpoint.
      num_q_heads, num_kv_heads, head_dim: attention shape.
      max_position_embeddings: longest context the checkpoint was made for.
      rms_norm_eps: epsilon of every RMS norm.
      rope: rotary embedding.
      tie_word_embeddings: the head is the transposed embedding.
      attention_bias: the q, k and v projections have biases.
      mlp_bias: the projections of the MLP have biases.
      bos_token_id: begin-of-sequence id, if the config names one.
      eos_token_ids: end-of-sequence ids that the config names.
      dtype: element type of the checkpoint ("bfloat16", "float16", "float32").
      attention_output_bias: the output projection of the attention has a bias.
      layer_windows: sliding window of each layer in tokens, None for full attention; left out,
        all attend fully.
      quantization: how the checkpoint is quantised, None if it is not.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    attention_output_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()
    quantization: CheckpointFormat | None = None

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries for num_layers="
                f"{self.num_layers}; give one per layer, or () for full attention in all."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Return the config that a Hugging Face `config.json` describes.

        Reads the current spelling (`rope_parameters`, `dtype`) and the classic one (`rope_theta`,
        `rope_scaling`, `torch_dtype`). Keys that do not change the forward pass are ignored.

        Raises:
          CheckpointError: if a key is missing or its value cannot be.
          UnsupportedModelError: if the model needs what this engine does not implement.
        """
        architecture = _architecture(config)
        _refuse_unimplemented(config, architecture)
        num_layers = _positive_int(config, "num_hidden_layers")
        hidden_size = _positive_int(config, "hidden_size")
        num_q_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", default=num_q_heads)
        head_dim = _positive_int(config, "head_dim", default=hidden_size // num_q_heads)
        if num_q_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads={num_q_heads} of the model's config is not a multiple of "
                f"num_key_value_heads={num_kv_heads}; the checkpoint is damaged, fetch it again."
            )
        if head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim={head_dim} is odd; rotary embedding needs pairs of features."
            )
        max_position_embeddings = _positive_int(config, "max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=_positive_float(config, "rms_norm_eps"),
            rope=_rope(config, max_position_embeddings),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(config),
            dtype=_dtype(config),
            layer_windows=_WINDOWS[architecture](config, num_layers),
            quantization=_quantization(config),
            **_BIASES[architecture](config),
        )


def _llama_biases(config: Mapping[str, Any]) -> dict[str, bool]:
    attention_bias = bool(config.get("attention_bias", False))
    return {
        "attention_bias": attention_bias,
        "attention_output_bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _qwen2_biases(_config: Mapping[str, Any]) -> dict[str, bool]:
    return {"attention_bias": True}  # Not in the config: Qwen2 always has them, on q, k and v only.


def _no_biases(_config: Mapping[str, Any]) -> dict[str, bool]:
    return {}


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _llama_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise UnsupportedModelError(
            f"sliding_window={window} is not implemented for LlamaForCausalLM; "
            "only full attention is."
        )
    return _windows_by_layer(config, None, [_FULL] * num_layers)


def _qwen2_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    # Qwen2 configs name a window and turn it off; its first layers attend fully even if it is on.
    if not config.get("use_sliding_window", False):
        return _windows_by_layer(config, None, [_FULL] * num_layers)
    window = _positive_int(config, "sliding_window", default=4096)
    num_full = 0
    if config.get("max_window_layers") != 0:
        num_full = min(_positive_int(config, "max_window_layers", default=28), num_layers)
    defaults = [_FULL] * num_full + [_SLIDING] * (num_layers - num_full)
    return _windows_by_layer(config, window, defaults)


def _mistral_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    # An absent key is the window of the first Mistral; later ones say null.
    if config.get("sliding_window", 4096) is None:
        return _windows_by_layer(config, None, [_FULL] * num_layers)
    window = _positive_int(config, "sliding_window", default=4096)
    return _windows_by_layer(config, window, [_SLIDING] * num_layers)


def _windows_by_layer(
    config: Mapping[str, Any], window: int | None, defaults: Sequence[str]
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer by `layer_types`, or by `defaults` without them."""
    layer_types = config.get("layer_types") or defaults
    unknown = sorted({str(kind) for kind in layer_types} - {_FULL, _SLIDING})
    if unknown or (_SLIDING in layer_types and window is None):
        raise UnsupportedModelError(
            f"layer_types with {', '.join(unknown or [_SLIDING])} are not implemented for a model "
            f"with sliding_window={window}; only full_attention is, and sliding_attention where "
            "the config turns a window on."
        )
    if len(layer_types) != len(defaults):
        raise CheckpointError(
            f"layer_types of the model's config has {len(layer_types)} entries for "
            f"{len(defaults)} layers; the checkpoint is damaged, fetch it again."
        )
    return tuple(window if kind == _SLIDING else None for kind in layer_types)


_BIASES: dict[str, Callable[[Mapping[str, Any]], dict[str, bool]]] = {
    "LlamaForCausalLM": _llama_biases,
    "MistralForCausalLM": _no_biases,
    "Qwen2ForCausalLM": _qwen2_biases,
}
_WINDOWS: dict[str, Callable[[Mapping[str, Any], int], tuple[int | None, ...]]] = {
    "LlamaForCausalLM": _llama_windows,
    "MistralForCausalLM": _mistral_windows,
    "Qwen2ForCausalLM": _qwen2_windows,
}
SUPPORTED_ARCHITECTURES = tuple(_BIASES)
"""Names that `ModelConfig.from_hf` accepts; the keys of `registry.ARCHITECTURES`."""


def _architecture(config: Mapping[str, Any]) -> str:
    names = _required(config, "architectures")
    if not isinstance(names, list | tuple) or not names:
        raise CheckpointError(
            f"architectures={names!r} of the model's config must be a list of names."
        )
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names))} is not implemented; "
        f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _refuse_unimplemented(config: Mapping[str, Any], architecture: str) -> None:
    """Raise for what would change the forward pass and is not implemented."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act={activation!r} is not implemented for {architecture}; supported: silu."
        )


def _quantization(config: Mapping[str, Any]) -> CheckpointFormat | None:
    try:
        return read_quantization(config)
    except UnsupportedQuantizationError as error:
        raise UnsupportedModelError(str(error)) from None


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters`, or `rope_scaling` and `rope_theta`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Copied, with the keys that may also stand outside: the inner ones win.
    values = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    values |= {key: value for key, value in scaling.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError(
            "rope_parameters by layer type are not implemented; only one for all layers is."
        )
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not implemented; supported: {', '.join(ROPE_KINDS)}."
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor={values['partial_rotary_factor']} is not implemented; "
            "only rotation of the whole head is."
        )
    theta = _positive_float(values, "rope_theta", default=10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = _positive_int(
        values, "original_max_position_embeddings", default=max_position_embeddings
    )
    # DeepSeek-style yarn configs may give the two lengths instead of their ratio.
    ratio = max_position_embeddings / original if kind == "yarn" else None
    factor = _positive_float(values, "factor", default=ratio)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "dynamic":
        return RopeConfig(kind, theta, factor, original)
    if kind == "llama3":
        low = _positive_float(values, "low_freq_factor")
        high = _positive_float(values, "high_freq_factor")
        if high <= low:
            raise CheckpointError(
                f"high_freq_factor={high} of the model's rope must exceed low_freq_factor={low}."
            )
        return RopeConfig(kind, theta, factor, original, low, high)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=_positive_float(values, "beta_fast", default=32.0),
        beta_slow=_positive_float(values, "beta_slow", default=1.0),
        attention_factor=_optional_float(values, "attention_factor"),
        mscale=_optional_float(values, "mscale"),
        mscale_all_dim=_optional_float(values, "mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _dtype(config: Mapping[str, Any]) -> str:
    # A config without the key is float32, as in transformers.
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"dtype={dtype!r} of the checkpoint is not implemented; supported: {', '.join(DTYPES)}."
        )
    return str(dtype)


def _required(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise CheckpointError(
            f"the model's config has no {key!r}; check that the checkpoint is complete."
        )
    return value


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key) if default is not None else _required(config, key)
    if value is None:
        assert default is not None
        return default
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise CheckpointError(f"{key}={value!r} of the model's config must be a positive integer.")
    return int(value)


def _positive_float(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key) if default is not None else _required(config, key)
    if value is None:
        assert default is not None
        return default
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if not is_number or not 0 < value < math.inf:
        raise CheckpointError(f"{key}={value!r} of the model's config must be a positive number.")
    return float(value)


def _optional_float(config: Mapping[str, Any], key: str) -> float | None:
    return _positive_float(config, key) if config.get(key) else None  # 0 is absent, as elsewhere.
