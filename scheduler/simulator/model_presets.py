"""Shapes of well-known models, so that a simulation needs no checkpoint, and their sizes."""

import json
import pathlib
from dataclasses import dataclass

from paged.models.config import ModelConfig


def _llama(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, tied: bool
) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 128256, hidden, mlp, layers, heads, kv_heads, head_dim,
        max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        "Qwen2ForCausalLM", vocab, hidden, mlp, layers, heads, kv_heads, hidden // heads,
        max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=tied,
        attention_bias=True,
    )  # fmt: skip


MODELS = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128, tied=False),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128, tied=False),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128, tied=False),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128, tied=True),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, vocab=152064, tied=False),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, vocab=152064, tied=False),
    "smollm2-135m": ModelConfig(
        "LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64,
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of a model by what a step does with them.

    Attributes:
      layer_matmul: of the projections of all layers; each token meets each of them once.
      head: of the projection to the vocabulary; each sampled row meets them.
      total: all, embedding, norms and biases included; tied embeddings once.
    """

    layer_matmul: int
    head: int
    total: int


def model_size(model: ModelConfig) -> ModelSize:
    """Return the number of parameters of a decoder."""
    hidden, mlp = model.hidden_size, model.intermediate_size
    q_dim = model.num_q_heads * model.head_dim
    kv_dim = model.num_kv_heads * model.head_dim
    layer = hidden * (q_dim + 2 * kv_dim) + q_dim * hidden + 3 * hidden * mlp
    small = (4 if model.norms == "around" else 2) * hidden
    small += {"none": 0, "head": 2 * model.head_dim, "all": q_dim + kv_dim}[model.qk_norm]
    small += (q_dim + 2 * kv_dim) * model.attention_bias + hidden * model.attention_output_bias
    small += (2 * mlp + hidden) * model.mlp_bias
    embedding = model.vocab_size * hidden
    tables = embedding if model.tie_word_embeddings else 2 * embedding
    total = model.num_layers * (layer + small) + hidden + tables
    return ModelSize(model.num_layers * layer, embedding, total)


def find_model(name: str) -> ModelConfig:
    """Return a preset by name, or the model of a local `config.json` (or a folder with one).

    Raises: ValueError if it is neither, with the names there are.
    """
    preset = MODELS.get(name.lower())
    if preset is not None:
        return preset
    path = pathlib.Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model={name!r} is neither a file or folder nor one of {', '.join(MODELS)}."
        )
    return ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
