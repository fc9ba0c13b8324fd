"""GPTQ: 4 or 8 bits, neighbours along the inputs in a word, groups in any order of the inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.models.errors import UnsupportedModelError
from paged.models.quantized.act_order import inputs_by_group
from paged.models.quantized.bit_packing import unpack_first, unpack_last
from paged.models.quantized.checkpoint_format import (
    FLOATS,
    CheckpointFormat,
    Tensors,
    TensorSpec,
)
from paged.models.quantized.fields import flag_of, group_size_of, require
from paged.models.quantized.grouped_weight import GroupedForm, group_problem


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """AutoGPTQ's layout, and GPTQModel's "gptq_v2".

    Attributes:
      bits: 4 or 8.
      group_size: inputs that share a scale; None: all.
      is_symmetric: all zero points are the middle.
      is_act_order: `g_idx` says which group an input is in.
      zero_offset: what is added to stored zero points.

    Source: arXiv:2210.17323; AutoGPTQ, `auto_gptq/nn_modules/qlinear/qlinear_cuda.py`.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    is_act_order: bool
    zero_offset: int

    @property
    def form(self) -> GroupedForm:
        """The form in memory."""
        is_permuted = self.is_act_order and self.group_size is not None
        return GroupedForm(self.bits, self.group_size, not self.is_symmetric, is_permuted)

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """See `LayerScheme.problem`."""
        per_word = 32 // self.bits
        if num_outputs % per_word or num_inputs % per_word:
            return f"{num_outputs} x {num_inputs} weights do not fill words of {per_word}"
        return group_problem(num_inputs, self.group_size)

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """See `LayerScheme.tensors`."""
        num_groups, per_word = num_inputs // (self.group_size or num_inputs), 32 // self.bits
        return {
            "qweight": TensorSpec((num_inputs // per_word, num_outputs), ("int32",)),
            "qzeros": TensorSpec((num_groups, num_outputs // per_word), ("int32",)),
            "scales": TensorSpec((num_groups, num_outputs), FLOATS),
            "g_idx": TensorSpec((num_inputs,), ("int32",)),
        }

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `LayerScheme.convert`."""
        codes = unpack_first(tensors["qweight"], self.bits)
        parts = {"scales": tensors["scales"].astype(np.float32)}
        order = self._order(tensors["g_idx"])
        if self.form.is_permuted:
            codes = codes[:, order]
            parts["order"] = order.astype(np.int32)
        # Masked after the addition: a zero point of 0 is stored as -1.
        zeros = (unpack_last(tensors["qzeros"], self.bits).astype(np.int32) + self.zero_offset) & (
            2**self.bits - 1
        )
        middle = 2 ** (self.bits - 1)
        if self.form.has_zeros:
            parts["zeros"] = zeros.astype(np.uint8)
        elif (zeros != middle).any():
            raise ValueError(f"qzeros holds other zero points than {middle}, but sym is true")
        return parts | {"values": self.form.stored(codes)}

    def _order(self, groups: np.ndarray) -> np.ndarray:
        """Return the inputs in the order of their groups."""
        if self.group_size is None:
            return np.arange(len(groups))
        order = inputs_by_group(groups, self.group_size, "g_idx")
        if not self.is_act_order and (order[1:] < order[:-1]).any():
            raise ValueError("g_idx is not in order, but desc_act is false")
        return order


def read_gptq(fields: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format that the `quantization_config` of a GPTQ checkpoint describes.

    Raises:
      UnsupportedModelError: if it is none that is implemented.
    """
    bits = require(fields, "bits", (4, 8))
    layout = require(fields, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    scheme = GptqScheme(
        bits=bits,
        group_size=group_size_of(fields),
        is_symmetric=flag_of(fields, "sym", default=True),
        is_act_order=flag_of(fields, "desc_act", default=False),
        zero_offset=1 if layout == "gptq" else 0,
    )
    return CheckpointFormat(
        "gptq",
        ((".*", scheme),),
        _left_out(fields.get("dynamic") or {}),
        head=flag_of(fields, "lm_head", default=False),
    )


def _left_out(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns of modules that GPTQModel's rules leave in full, as routers of experts.

    Raises:
      UnsupportedModelError: if a rule quantises some modules differently.
    """
    if others := [rule for rule in rules if not rule.startswith("-:")]:
        raise UnsupportedModelError(
            f"dynamic={others!r} (rules for single modules) is not implemented; only rules that "
            "leave modules out are, which begin with '-:'"
        )
    return tuple(rule.removeprefix("-:") for rule in rules)
