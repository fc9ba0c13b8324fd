"""`ModelConfig`: the numbers of an architecture, read from `config.json` or GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
      attention_bias: q, k and v projections (and the output one in llama) have biases.
      mlp_bias: the projections of the MLP have biases.
      bos_token_id: begin-of-sequence id, if the config names one.
      eos_token_ids: end-of-sequence ids that the config names.
      dtype: element type of the checkpoint ("bfloat16", "float16", "float32").
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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Return the config that a Hugging Face `config.json` describes."""
        raise UnsupportedModelError(f"to be written: {config}")
