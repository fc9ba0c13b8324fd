"""AWQ: 4 bits with zero points, eight output columns in a word, in an order of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.models.quantized.bit_packing import unpack_last
from paged.models.quantized.checkpoint_format import (
    FLOATS,
    CheckpointFormat,
    Tensors,
    TensorSpec,
)
from paged.models.quantized.fields import group_size_of, names_of, require, substring_patterns
from paged.models.quantized.grouped_weight import GroupedForm, group_problem

# Nibble j of a word is column _COLUMNS[j] of its eight; so nibble _NIBBLES[i] is column i.
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLES = tuple(int(i) for i in np.argsort(_COLUMNS))


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """AutoAWQ's "gemm" layout.

    Attributes:
      group_size: inputs that share a scale; None: all.

    Source: arXiv:2306.00978; AutoAWQ, `awq/modules/linear/gemm.py`.
    """

    group_size: int | None

    @property
    def form(self) -> GroupedForm:
        """The form in memory."""
        return GroupedForm(4, self.group_size, has_zeros=True)

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """See `LayerScheme.problem`."""
        if num_outputs % 8:
            return f"{num_outputs} outputs are no multiple of the 8 in a word"
        return group_problem(num_inputs, self.group_size)

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """See `LayerScheme.tensors`."""
        num_groups = num_inputs // (self.group_size or num_inputs)
        return {
            "qweight": TensorSpec((num_inputs, num_outputs // 8), ("int32",)),
            "qzeros": TensorSpec((num_groups, num_outputs // 8), ("int32",)),
            "scales": TensorSpec((num_groups, num_outputs), FLOATS),
        }

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `LayerScheme.convert`."""
        return {
            "values": self.form.stored(_columns(tensors["qweight"]).T),
            "scales": tensors["scales"].astype(np.float32),
            "zeros": _columns(tensors["qzeros"]),
        }


def read_awq(fields: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format that the `quantization_config` of an AWQ checkpoint describes.

    Raises:
      UnsupportedModelError: if it is none that is implemented.
    """
    require(fields, "bits", (4,), names=("bits", "w_bit"))
    require(fields, "version", ("gemm",), default="gemm", lower=True)
    require(fields, "zero_point", (True,), default=True)
    scheme = AwqScheme(group_size_of(fields, names=("group_size", "q_group_size")))
    ignored = substring_patterns(names_of(fields, "modules_to_not_convert"))
    return CheckpointFormat("awq", ((".*", scheme),), ignored)


def _columns(words: np.ndarray) -> np.ndarray:
    """Return codes `[n, m * 8]` of words `[n, m]`, in the order of the columns."""
    nibbles = unpack_last(words, 4).reshape(*words.shape, 8)
    return nibbles[..., _NIBBLES].reshape(len(words), -1)
