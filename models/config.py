"""`ModelConfig`: the numbers of an architecture, read from `config.json` or GGUF metadata.

What the engine does not implement is refused here, before any weight is read, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paged.models.config_values import positive_float, positive_int, required
from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.families import FAMILIES, NOT_IMPLEMENTED, read_activation
from paged.models.latent_config import LatentConfig
from paged.models.moe_config import ExpertsConfig
from paged.models.quantized.checkpoint_format import CheckpointFormat
from paged.models.quantized.formats import read_quantization
from paged.models.rope_config import RopeConfig, read_rope
from paged.models.text_part import text_config

DTYPES = ("bfloat16", "float16", "float32")
"""Element types that weights and activations may have."""

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
"""Names that `ModelConfig.from_hf` accepts; the keys of `registry.ARCHITECTURES`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model; hashable, so it can be a static argument.

    Attributes:
      architecture: name in the registry, such as "LlamaForCausalLM".
      vocab_size, hidden_size, intermediate_size, num_layers: as in the checkpoint.
      num_q_heads, num_kv_heads, head_dim: attention shape.
      max_position_embeddings: longest context the checkpoint was made for.
      rms_norm_eps: epsilon of every RMS norm.
      rope: rotary embedding; where `sliding_rope` is given, of layers with full attention.
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
      sliding_rope: rotary embedding of layers with a sliding window; None: `rope`.
      norms: where the norms of attention and MLP are: "before" each, "after" it (on what is added
        to the residual stream), or "around" it (both).
      norm_adds_one: norms multiply by 1 plus their weight, q and k norms too.
      qk_norm: how queries and keys are normalised before the rotary embedding: "none", each "head"
        by itself, or "all" heads of a token together.
      activation: of the MLP, a name in `layers.ACTIVATIONS`.
      attention_scale: multiplies the attention logits; None is `head_dim ** -0.5`.
      attention_soft_cap: attention logits become `cap * tanh(logits / cap)`; None: as they are.
      logit_soft_cap: the same of the model's logits.
      embedding_multiplier: of the embedded tokens.
      residual_multiplier: of what attention and MLP add to the residual stream.
      logit_divisor: what the logits are divided by.
      attention_sinks: each head's softmax also runs over a logit of its own, a parameter.
      experts: the mixture of experts in the place of MLPs, None for a dense model.
      latent: the vectors that keys and values are made of, where the cache holds these instead:
        `num_kv_heads` is 1 and `head_dim` that of such a vector. None: keys and values.
      num_further_layers: layers of the checkpoint after the last, which predict further tokens;
        they are not loaded.
      saved_quantization: what `--quantization` made of the weights before they were saved by
        `paged convert`; None: nothing, or they are no such weights.
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
    sliding_rope: RopeConfig | None = None
    norms: str = "before"
    norm_adds_one: bool = False
    qk_norm: str = "none"
    activation: str = "silu"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    attention_sinks: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    num_further_layers: int = 0
    saved_quantization: str | None = None

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
        config = text_config(config)
        num_layers = positive_int(config, "num_hidden_layers")
        hidden_size = positive_int(config, "hidden_size")
        num_q_heads = positive_int(config, "num_attention_heads")
        num_kv_heads = positive_int(config, "num_key_value_heads", default=num_q_heads)
        head_dim = positive_int(config, "head_dim", default=hidden_size // num_q_heads)
        if num_q_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads={num_q_heads} of the model's config is not a multiple of "
                f"num_key_value_heads={num_kv_heads}; the checkpoint is damaged, fetch it again."
            )
        if head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim={head_dim} is odd; rotary embedding needs pairs of features."
            )
        max_position_embeddings = positive_int(config, "max_position_embeddings")
        common: dict[str, Any] = {
            "architecture": architecture,
            "vocab_size": positive_int(config, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": positive_int(config, "intermediate_size"),
            "num_layers": num_layers,
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": max_position_embeddings,
            "rms_norm_eps": positive_float(config, "rms_norm_eps"),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "bos_token_id": config.get("bos_token_id"),
            "eos_token_ids": _eos_token_ids(config),
            "dtype": _dtype(config),
            "quantization": _quantization(config, architecture),
        }
        family = FAMILIES[architecture](config, num_layers)
        if "rope" not in family:
            family["rope"] = read_rope(config, max_position_embeddings, head_dim)
        if "activation" not in family:
            family["activation"] = read_activation(config)
        return cls(**common | family)

    def for_context(self, max_model_len: int) -> "ModelConfig":
        """Return the config of a model that serves contexts of at most `max_model_len` tokens.

        Only "longrope" depends on it: its frequencies are those of short contexts if no longer
        ones can come. (The reference follows the current length, which a KV cache cannot.)
        """
        if self.rope.kind != "longrope":
            return self
        return replace(self, rope=replace(self.rope, context_length=max_model_len))

    @property
    def quantization_method(self) -> str | None:
        """How the weights are quantised as they are stored; None if they are not."""
        return self.saved_quantization if self.quantization is None else self.quantization.method

    @property
    def kv_planes(self) -> int:
        """How many planes the KV cache has, see `KVCacheSpec.num_planes`."""
        return 2 if self.latent is None else 1

    @property
    def rope_dim(self) -> int:
        """Features of a head that its rotary embedding is made for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def layer_rope(self, layer: int) -> RopeConfig:
        """Return the rotary embedding of a layer."""
        if self.sliding_rope is None or self.layer_windows[layer] is None:
            return self.rope
        return self.sliding_rope


def _architecture(config: Mapping[str, Any]) -> str:
    names = required(config, "architectures")
    if not isinstance(names, list | tuple) or not names:
        raise CheckpointError(
            f"architectures={names!r} of the model's config must be a list of names."
        )
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    reason = next((f": {why}" for name, why in NOT_IMPLEMENTED.items() if name in names), "")
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names))} is not implemented{reason}; "
        f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _quantization(config: Mapping[str, Any], architecture: str) -> CheckpointFormat | None:
    quantization = config.get("quantization_config")
    if architecture == "GptOssForCausalLM" and isinstance(quantization, Mapping):
        if quantization.get("quant_method") == "mxfp4":
            return None  # of the experts alone: ExpertsConfig.is_mxfp4
        raise UnsupportedModelError(
            f"quant_method={quantization.get('quant_method')!r} is not implemented for "
            f"{architecture}; supported: mxfp4."
        )
    return read_quantization(config)


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
