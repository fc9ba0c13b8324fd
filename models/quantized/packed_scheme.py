"""compressed-tensors' "pack-quantized": 4 or 8 bits, neighbours along the inputs in a word."""

from dataclasses import dataclass

import numpy as np

from paged.models.quantized.act_order import inputs_by_group
from paged.models.quantized.bit_packing import unpack_first, unpack_last
from paged.models.quantized.checkpoint_format import FLOATS, Tensors, TensorSpec
from paged.models.quantized.form import WeightForm
from paged.models.quantized.grouped_weight import GroupedForm, group_problem
from paged.models.quantized.int8_weight import Int8Form


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """`weight_packed`, signed integers plus the middle of their range, and `weight_scale`.

    Attributes:
      bits: 4 or 8.
      group_size: inputs that share a scale; None: all.
      is_symmetric: there are no zero points.
      is_act_order: `weight_g_idx` says which group an input is in.

    Source: compressed-tensors, `compressors/quantized_compressors/pack_quantized.py`.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    is_act_order: bool

    @property
    def form(self) -> WeightForm:
        """The form in memory."""
        if self._is_plain_int8:
            return Int8Form()
        return self._grouped

    @property
    def _is_plain_int8(self) -> bool:
        return self.bits == 8 and self.group_size is None and self.is_symmetric

    @property
    def _grouped(self) -> GroupedForm:
        return GroupedForm(self.bits, self.group_size, not self.is_symmetric, self.is_act_order)

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """See `LayerScheme.problem`."""
        per_word = 32 // self.bits
        if num_inputs % per_word or (num_outputs % per_word and not self.is_symmetric):
            return f"{num_outputs} x {num_inputs} weights do not fill words of {per_word}"
        return group_problem(num_inputs, self.group_size)

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """See `LayerScheme.tensors`."""
        num_groups, per_word = num_inputs // (self.group_size or num_inputs), 32 // self.bits
        specs = {
            "weight_packed": TensorSpec((num_outputs, num_inputs // per_word), ("int32",)),
            "weight_scale": TensorSpec((num_outputs, num_groups), FLOATS),
            "weight_shape": TensorSpec((2,), ("int64", "int32")),
        }
        if not self.is_symmetric:
            zeros = (num_outputs // per_word, num_groups)
            specs["weight_zero_point"] = TensorSpec(zeros, ("int32",))
        if self.is_act_order:
            specs["weight_g_idx"] = TensorSpec((num_inputs,), ("int32", "int64"))
        return specs

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `LayerScheme.convert`."""
        codes = unpack_last(tensors["weight_packed"], self.bits)
        if tuple(tensors["weight_shape"]) != codes.shape:
            raise ValueError(f"weight_shape is {tensors['weight_shape']}, not {codes.shape}")
        scales = tensors["weight_scale"].astype(np.float32)
        if self._is_plain_int8:
            # 128 less, by bits.
            return {"values": (codes ^ 128).view(np.int8), "scales": scales.reshape(-1)}
        parts = {"scales": np.ascontiguousarray(scales.T)}
        if not self.is_symmetric:
            parts["zeros"] = np.ascontiguousarray(
                unpack_first(tensors["weight_zero_point"], self.bits)
            )
        if self.is_act_order:
            order = inputs_by_group(
                tensors["weight_g_idx"], self.group_size or codes.shape[1], "weight_g_idx"
            )
            codes = codes[:, order]
            parts["order"] = order.astype(np.int32)
        return parts | {"values": self._grouped.stored(codes)}
