"""`quantized_layers`: which weights of a model are kept in fewer bits, in which form, and why."""

import math
from dataclasses import dataclass
from typing import Any

from flax import nnx

from paged.models.decoder import DecoderLM
from paged.models.errors import UnsupportedModelError
from paged.models.layers import Embed, Linear
from paged.models.moe import ExpertLinear
from paged.models.quantized.checkpoint_format import LayerScheme
from paged.models.quantized.form import WeightForm, store
from paged.models.quantized.formats import FORMATS
from paged.models.quantized.int8_weight import Int8Form
from paged.models.quantized.on_the_fly import ON_THE_FLY
from paged.models.registry import tensor_name

QUANTIZATIONS = (*ON_THE_FLY, *(name for name in FORMATS if name not in ON_THE_FLY))
"""What `--quantization` may say: what is made of a checkpoint, or what it is already."""


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A layer whose weight is kept in fewer bits.

    Attributes:
      path: of its weight in the model.
      layer: the layer.
      form: what the weight is kept in.
      module: name of the layer in the checkpoint.
      scheme: how the checkpoint stores the weight; None: unquantised.
    """

    path: tuple[Any, ...]
    layer: Linear | ExpertLinear | Embed
    form: WeightForm
    module: str
    scheme: LayerScheme | None

    @property
    def num_output_axes(self) -> int:
        """How many axes of the weight, the first, are outputs."""
        return len(self.layer.output_shape)

    @property
    def shape(self) -> tuple[int, int]:
        """How many outputs and inputs the weight has."""
        return _shape(self.layer)


def quantized_layers(model: DecoderLM, quantization: str | None) -> list[QuantizedLayer]:
    """Return the layers of an unquantised model whose weights are to be kept in fewer bits.

    Those are what the checkpoint's own quantisation says, or else what `quantization` makes of
    linear layers and of the head. Norms and biases stay as they are, and so does an embedding,
    unless it is the head.

    Args:
      model: its weights may be abstract.
      quantization: see `resolve_quantization`.

    Raises:
      UnsupportedModelError: if a weight cannot be stored as the checkpoint's config says.
    """
    if quantization is None and model.config.quantization is None:
        return []
    layers: list[tuple[tuple[Any, ...], Linear | ExpertLinear | Embed]] = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Linear)
        # Others are in few bits already, by the model's own nature: MXFP4.
        or (isinstance(module, ExpertLinear) and isinstance(module.weight, nnx.Param))
    ]
    layers.append((("embed" if model.lm_head is None else "lm_head",), model.head))
    found = []
    for path, layer in layers:
        weight_path = (*path, "weight")
        module = tensor_name(model.config.architecture, weight_path).removesuffix(".weight")
        scheme = _scheme(model, module, layer)
        form = scheme.form if scheme else None
        if model.config.quantization is None:
            form = _form_on_the_fly(layer, quantization)
        if form is not None:
            found.append(QuantizedLayer(weight_path, layer, form, module, scheme))
    return found


def quantize_layers(model: DecoderLM, quantization: str | None) -> None:
    """Keep the weights of `quantized_layers` in their forms; changes the model in place."""
    for quantized in quantized_layers(model, quantization):
        weight = quantized.layer.weight
        assert isinstance(weight, nnx.Param), "quantised already"
        layer = quantized.layer
        sum_axis = layer.sum_axis if isinstance(layer, Linear) else None
        layer.weight = store(weight, quantized.form, quantized.num_output_axes, sum_axis)


def resolve_quantization(requested: str | None, checkpoint: str | None) -> str | None:
    """Return what weights are quantised by, None if by nothing.

    Args:
      requested: one of `QUANTIZATIONS`, or None for whatever the checkpoint is.
      checkpoint: the method of the checkpoint, None if it is not quantised.

    Raises:
      ValueError: if the two contradict each other.
    """
    if requested is None or requested == checkpoint:
        return checkpoint
    if checkpoint is not None:
        raise ValueError(
            f"quantization={requested!r} contradicts the checkpoint, which is quantised by "
            f"{checkpoint!r} already; leave it out, or take an unquantised checkpoint."
        )
    if requested not in ON_THE_FLY:
        raise ValueError(
            f"quantization={requested!r} needs a checkpoint that is quantised so, but this one's "
            f"config has no quantization_config; choose {', '.join(ON_THE_FLY)}, which are made "
            "while a checkpoint is loaded, or leave it out."
        )
    return requested


def _scheme(
    model: DecoderLM, module: str, layer: Linear | ExpertLinear | Embed
) -> LayerScheme | None:
    formats, is_tied_head = model.config.quantization, layer is model.embed
    if formats is None or is_tied_head:
        return None
    if isinstance(layer, ExpertLinear):
        # The checkpoint stores one tensor for each expert, and so does its config name them.
        module = module.replace(".experts.", ".experts.0.")
    scheme = formats.scheme(module)
    if scheme is not None and isinstance(layer, ExpertLinear):
        tensors = ", ".join(scheme.tensors(*_shape(layer)))
        raise UnsupportedModelError(
            f"{module} and the other experts are stored by {formats.method} ({tensors}); of "
            "experts, only weights in full and gpt-oss' MXFP4 are implemented. Use the unquantized "
            "checkpoint, with --quantization int8 to keep its experts in 8 bits."
        )
    problem = None if scheme is None else scheme.problem(*_shape(layer))
    if problem is not None:
        raise UnsupportedModelError(
            f"{module} cannot be quantised as the checkpoint's quantization_config says: {problem}."
        )
    return scheme


def _form_on_the_fly(
    layer: Linear | ExpertLinear | Embed, quantization: str | None
) -> WeightForm | None:
    if quantization is None or quantization not in ON_THE_FLY:
        return None
    if isinstance(layer, ExpertLinear):
        return Int8Form()  # of whose parts one expert's are a slice, and which kernels have
    _, num_inputs = _shape(layer)
    return ON_THE_FLY[quantization](num_inputs, is_head=isinstance(layer, Embed))


def _shape(layer: Linear | ExpertLinear | Embed) -> tuple[int, int]:
    assert isinstance(layer.weight, nnx.Param)
    num_outputs = math.prod(layer.output_shape)
    return num_outputs, math.prod(layer.weight.shape) // num_outputs
