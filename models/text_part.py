"""The language model of a multimodal checkpoint: its part of the config, and of the tensors.

Images and sounds are no input here, so what encodes them is left out. Positions of text in several
dimensions (M-RoPE) are equal in all of them, so its rotary embedding is the ordinary one.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.tensor_source import TensorSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Where the language model is in a multimodal config.

    Attributes:
      model_types: of `text_config`, what can be.
      can_be_flat: old configs have no `text_config`, but its keys among the others.
      defaults: of the class of `text_config`, which published checkpoints leave out.
    """

    model_types: tuple[str, ...]
    can_be_flat: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


# The published config of Gemma 3 4B names five keys and relies on these.
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart(("gemma3_text",), defaults=_GEMMA3),
    "Mistral3ForConditionalGeneration": TextPart(("mistral",)),
    "Qwen2VLForConditionalGeneration": TextPart(("qwen2_vl_text", "qwen2_vl"), can_be_flat=True),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        ("qwen2_5_vl_text", "qwen2_5_vl"), can_be_flat=True
    ),
    "Qwen3VLForConditionalGeneration": TextPart(("qwen3_vl_text",)),
}
"""Multimodal architectures whose language model is of a family that there is."""

# Keys that are said for the whole checkpoint, unless the language model says them itself.
_SHARED = ("dtype", "torch_dtype", "compression_config")
# Keys that are said for the whole checkpoint first.
_OUTER = ("quantization_config", "bos_token_id", "eos_token_id")
_LISTS_OF_MODULES = ("ignore", "ignored_layers", "modules_to_not_convert")

_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
_OTHER_PARTS = re.compile(r"(?:model\.)?(vision_tower|visual|multi_modal_projector)\.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model; another one than of a multimodal model as it is.

    Args:
      config: a `config.json`.

    Raises:
      CheckpointError: if it has no language model's part.
      UnsupportedModelError: if its language model is none that can be.
    """
    names = config.get("architectures")
    names = names if isinstance(names, list | tuple) else ()
    name = next((str(name) for name in names if name in TEXT_PARTS), None)
    if name is None:
        return config
    part, text = TEXT_PARTS[name], config.get("text_config")
    if text is None and part.can_be_flat:
        text = config
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"text_config of the model's config ({name}) is {text!r}; it must hold the shape of "
            "the language model. Check that the checkpoint is complete."
        )
    if (kind := text.get("model_type", part.model_types[0])) not in part.model_types:
        raise UnsupportedModelError(
            f"text_config with model_type={kind!r} is not implemented for {name}; supported: "
            f"{', '.join(part.model_types)}."
        )
    values = {**part.defaults, **text, "architectures": [name]}
    values |= {key: config[key] for key in _SHARED if key in config and key not in text}
    values |= {key: config[key] for key in _OUTER if config.get(key) is not None}
    # Written in either place, and false in the other.
    tied = [level["tie_word_embeddings"] for level in (config, text) if _ties(level)]
    if tied:
        values["tie_word_embeddings"] = any(tied)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), Mapping):
            values[key] = _one_dimensional(values[key])
    if isinstance(values.get("quantization_config"), Mapping):
        values["quantization_config"] = _renamed_modules(values["quantization_config"])
    return values


def _ties(config: Mapping[str, Any]) -> bool:
    """Return whether a config says if embedding and head are one."""
    return config.get("tie_word_embeddings") is not None


def text_tensors(source: TensorSource) -> TensorSource:
    """Return the tensors of the language model, under the names that it has by itself."""
    names, others = {}, []
    for name in source.names():
        if _OTHER_PARTS.match(name):
            others.append(name)
        else:
            names[language_name(name)] = name
    if others:
        parts = sorted({match[1] for name in others if (match := _OTHER_PARTS.match(name))})
        logger.info("Text only: %d tensors of %s are left out.", len(others), " and ".join(parts))
    return _Renamed(source, names)


class _Renamed:
    """Some tensors of a source, under other names."""

    def __init__(self, source: TensorSource, names: dict[str, str]) -> None:
        self._source, self._names = source, names

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._source.shape(self._names[name])

    def read(self, name: str) -> np.ndarray:
        """Return one tensor."""
        return self._source.read(self._names[name])

    def close(self) -> None:
        """Let go of the files."""
        self._source.close()


def language_name(name: str) -> str:
    """Return what a tensor or module of a multimodal model's language part is called alone."""
    for prefix, own in _RENAMED:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _one_dimensional(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding without its sections of dimensions."""
    values = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in values.items()
    }


def _renamed_modules(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `quantization_config` that calls modules by the language model's own names."""
    values = dict(quantization)
    for key in _LISTS_OF_MODULES:
        if isinstance(values.get(key), list | tuple):
            values[key] = [
                language_name(name) if isinstance(name, str) else name for name in values[key]
            ]
    return values
