"""`AdapterConfig`: what the `adapter_config.json` of a LoRA adapter says, in PEFT's form."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged.models.errors import AdapterNotFoundError, UnsupportedAdapterError

# Field -> what it is. Each changes what is computed, in a way that is not implemented.
_UNSUPPORTED = {
    "use_dora": "DoRA, which scales the whole weight",
    "lora_bias": "a bias of B",
    "alora_invocation_tokens": "an activated LoRA, which begins within the prompt",
    "alora_invocation_string": "an activated LoRA, which begins within the prompt",
    "layer_replication": "a model with layers repeated",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "changes of parameters that are no linear layers",
    "use_qalora": "QA-LoRA, which pools the input",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "a router between adapters",
}
# Beginnings of `init_lora_weights` that change the base weights, too.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")
# Of models that classify; one that generates has none and does not miss them.
_HEADS = frozenset({"classifier", "score"})
_MERGE = "Merge it into the model's weights (PEFT's merge_and_unload) and serve those"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and factors of an adapter.

    Attributes:
      rank, alpha: of all modules that the patterns do not name.
      rank_pattern, alpha_pattern: those of modules whose name, or its end, matches the key.
      use_rslora: factors are alpha / sqrt(rank) instead of alpha / rank.
      ignored: first parts of names of tensors that this model has no use for.

    Source: https://huggingface.co/docs/peft (LoraConfig); rsLoRA, arXiv:2312.03732.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    ignored: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "AdapterConfig":
        """Return the config that the file holds.

        Raises:
          AdapterNotFoundError: if it is no config of a LoRA adapter, or damaged.
          UnsupportedAdapterError: if it asks for what is not implemented; names the field.
        """
        if fields.get("peft_type", "LORA") != "LORA":
            raise UnsupportedAdapterError(
                f"adapter_config.json: peft_type={fields['peft_type']!r} is not implemented, only "
                f"LORA is. {_MERGE}."
            )
        _check_supported(fields)
        rank, alpha = fields.get("r"), fields.get("lora_alpha")
        patterns = {name: fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
        for name, value in patterns.items():
            if not isinstance(value, Mapping) or not all(map(_is_pattern, value)):
                raise _damaged(name, value, "an object whose keys are patterns")
        for value in (rank, *patterns["rank_pattern"].values()):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _damaged("r (or rank_pattern)", value, "a positive integer")
        for value in (alpha, *patterns["alpha_pattern"].values()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise _damaged("lora_alpha (or alpha_pattern)", value, "a number")
        assert isinstance(rank, int)
        assert isinstance(alpha, int | float)
        return cls(
            rank,
            alpha,
            **patterns,
            use_rslora=bool(fields.get("use_rslora")),
            ignored=frozenset(fields.get("modules_to_save") or ()),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter at one module."""
        return _matching(self.rank_pattern, module, self.rank)

    def factor_of(self, module: str) -> float:
        """Return what the product with A and B is multiplied by at one module."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _check_supported(fields: Mapping[str, Any]) -> None:
    found = {name: why for name, why in _UNSUPPORTED.items() if fields.get(name)}
    if fields.get("bias", "none") != "none":
        found["bias"] = "biases of the base model changed"
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        found["init_lora_weights"] = "base weights that were changed before the training"
    if unknown := set(fields.get("modules_to_save") or ()) - _HEADS:
        found["modules_to_save"] = f"whole modules of its own ({', '.join(sorted(unknown))})"
    for name, why in found.items():
        raise UnsupportedAdapterError(
            f"adapter_config.json: {name}={fields[name]!r} ({why}) is not implemented. {_MERGE}."
        )


def _damaged(name: str, value: Any, rule: str) -> AdapterNotFoundError:
    return AdapterNotFoundError(
        f"adapter_config.json: {name}={value!r} must be {rule}; fetch the adapter again."
    )


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True


def _matching[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that is a module's name or the end of it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # as PEFT does
            return value
    return default
