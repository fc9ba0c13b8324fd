"""Shapes of well-known models, so that a simulation or a plan needs no checkpoint."""

import pathlib

from paged.models.checkpoint import read_model_config
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


def find_model(name: str, *, revision: str | None = None, token: str | None = None) -> ModelConfig:
    """Return a preset by name, or the shape of any other model; no weights are read.

    Args:
      name: of a preset, or what `read_model_config` takes.
      revision, token: for a model on the Hub.

    Raises: ValueError if it is neither, with the names there are; CheckpointError and
      UnsupportedModelError as `read_model_config`.
    """
    preset = MODELS.get(name.lower())
    if preset is not None:
        return preset
    if "/" not in name and not pathlib.Path(name).exists():
        raise ValueError(
            f"model={name!r} is neither a file or folder nor one of {', '.join(MODELS)}; a model "
            "on the Hugging Face Hub is organisation/name."
        )
    return read_model_config(name, revision=revision, token=token)
