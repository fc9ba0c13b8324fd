"""Checkpoint tensors in 8 bits: e4m3 and int8, with scales for tensors, outputs or blocks."""

from dataclasses import dataclass

import numpy as np

from paged.models.quantized.block_float8_weight import BlockFloat8Form
from paged.models.quantized.checkpoint_format import FLOATS, Tensors, TensorSpec
from paged.models.quantized.float8_weight import Float8Form
from paged.models.quantized.int8_weight import Int8Form


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """`weight` in e4m3 and `weight_scale`, for the tensor or for each output.

    Attributes:
      is_per_output: `weight_scale` is `[num_outputs, 1]`, else one number.
      activations: one of `float8_weight.ACTIVATIONS`; "static" has an `input_scale`.
    """

    is_per_output: bool
    activations: str | None

    @property
    def form(self) -> Float8Form:
        """The form in memory; a scale for the tensor is kept once for each output."""
        return Float8Form(self.activations)

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """See `LayerScheme.problem`: any shape can be stored so."""
        return None

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """See `LayerScheme.tensors`."""
        scale = (num_outputs, 1) if self.is_per_output else (1,)
        specs = {
            "weight": TensorSpec((num_outputs, num_inputs), ("float8_e4m3fn",)),
            "weight_scale": TensorSpec(scale, FLOATS),
        }
        if self.activations == "static":
            specs["input_scale"] = TensorSpec((1,), FLOATS)
        return specs

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `LayerScheme.convert`."""
        weight, scale = tensors["weight"], tensors["weight_scale"].astype(np.float32)
        parts = {"values": weight, "scales": np.broadcast_to(scale.reshape(-1), len(weight))}
        if self.activations == "static":
            input_scale = tensors["input_scale"].astype(np.float32).reshape(1)
            if not input_scale[0] > 0:
                raise ValueError(f"input_scale is {input_scale[0]}, not more than 0")
            parts["input_scale"] = input_scale
        return parts


@dataclass(frozen=True, slots=True)
class BlockFloat8Scheme:
    """`weight` in e4m3 and one scale for each block of outputs and inputs.

    Attributes:
      block_outputs, block_inputs: size of a block; the last outputs may fill none.
      rounds_activations: rows are rounded to e4m3, each run of `block_inputs` by its own largest.
      scale_name: of the tensor of scales, which weights are multiplied by whatever its name says.

    Source: DeepSeek-V3, `inference/kernel.py`.
    """

    block_outputs: int
    block_inputs: int
    rounds_activations: bool = True
    scale_name: str = "weight_scale_inv"

    @property
    def form(self) -> BlockFloat8Form:
        """The form in memory."""
        return BlockFloat8Form(self.block_inputs, self.rounds_activations)

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """See `LayerScheme.problem`."""
        if num_inputs % self.block_inputs:
            return f"{num_inputs} inputs cannot be cut into blocks of {self.block_inputs}"
        return None

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """See `LayerScheme.tensors`."""
        scales = (-(-num_outputs // self.block_outputs), num_inputs // self.block_inputs)
        return {
            "weight": TensorSpec((num_outputs, num_inputs), ("float8_e4m3fn",)),
            self.scale_name: TensorSpec(scales, FLOATS),
        }

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `LayerScheme.convert`."""
        weight, scales = tensors["weight"], tensors[self.scale_name].astype(np.float32)
        by_output = scales.reshape(-1, weight.shape[1] // self.block_inputs).T
        by_output = np.repeat(by_output, self.block_outputs, axis=1)
        return {"values": weight.view(np.uint8), "scales": by_output[:, : len(weight)]}


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """`weight` in int8 and a `weight_scale`, for the tensor or for each output.

    Attributes:
      is_per_output: `weight_scale` is `[num_outputs, 1]`, else one number.
      rounds_activations: rows are rounded to int8, each by its own largest element.
    """

    is_per_output: bool
    rounds_activations: bool

    @property
    def form(self) -> Int8Form:
        """The form in memory."""
        return Int8Form(self.rounds_activations)

    def problem(self, num_outputs: int, num_inputs: int) -> str | None:
        """See `LayerScheme.problem`: any shape can be stored so."""
        return None

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, TensorSpec]:
        """See `LayerScheme.tensors`."""
        scale = (num_outputs, 1) if self.is_per_output else (1,)
        return {
            "weight": TensorSpec((num_outputs, num_inputs), ("int8",)),
            "weight_scale": TensorSpec(scale, FLOATS),
        }

    def convert(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """See `LayerScheme.convert`."""
        weight, scale = tensors["weight"], tensors["weight_scale"].astype(np.float32)
        return {"values": weight, "scales": np.broadcast_to(scale.reshape(-1), len(weight))}
