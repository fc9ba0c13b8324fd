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
from paged.models.quantized.stacked_form import StackedForm
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
        """How many outputs and inputs the weight has, of experts that of one."""
        return _shape(self.layer)

    @property
    def num_experts(self) -> int | None:
        """How many weights lie one beside the other; None: it is no layer of experts."""
        return self.layer.output_shape[0] if isinstance(self.layer, ExpertLinear) else None

    def expert_module(self, expert: int) -> str:
        """Return the name in the checkpoint of one expert's layer."""
        return _expert_module(self.module, expert)


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
        form = None if scheme is None else _form(scheme, layer)
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
        sum_axis = None if isinstance(layer, Embed) else layer.sum_axis
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
        # All experts of a layer are stored alike, so that they are one stack.
        module = _expert_module(module, 0)
    scheme = formats.scheme(module)
    problem = None if scheme is None else scheme.problem(*_shape(layer))
    if problem is not None:
        raise UnsupportedModelError(
            f"{module} cannot be quantised as the checkpoint's quantization_config says: {problem}."
        )
    return scheme


def _form(scheme: LayerScheme, layer: Linear | ExpertLinear | Embed) -> WeightForm:
    return StackedForm(scheme.form) if isinstance(layer, ExpertLinear) else scheme.form


def _expert_module(module: str, expert: int) -> str:
    return module.replace(".experts.", f".experts.{expert}.")


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
    num_stacked = layer.output_shape[0] if isinstance(layer, ExpertLinear) else 1
    num_outputs = math.prod(layer.output_shape)
    return num_outputs // num_stacked, math.prod(layer.weight.shape) // num_outputs
