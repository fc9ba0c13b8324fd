"""The method "fp8": e4m3 with a scale for each tensor (AutoFP8), or for blocks (DeepSeek)."""

from collections.abc import Mapping
from typing import Any

from paged.models.quantized.checkpoint_format import CheckpointFormat, LayerScheme
from paged.models.quantized.eight_bit_schemes import BlockFloat8Scheme, Float8Scheme
from paged.models.quantized.fields import block_size_of, module_patterns, names_of, require


def read_fp8(fields: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format that the `quantization_config` of an FP8 checkpoint describes.

    Raises:
      UnsupportedModelError: if it is none that is implemented.
    """
    require(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    # Scales of activations that are powers of two, as DeepSeek-V3.1 has them, round otherwise.
    require(fields, "scale_fmt", ("float",), default="float")
    ignored = (*names_of(fields, "ignored_layers"), *names_of(fields, "modules_to_not_convert"))
    return CheckpointFormat(
        "fp8",
        ((".*", _scheme(fields)),),
        module_patterns(ignored),
        ignored_tensors=r"\.(k_scale|v_scale|kv_scale|output_scale)$",
    )


def _scheme(fields: Mapping[str, Any]) -> LayerScheme:
    if fields.get("weight_block_size") is not None:
        # There are no static scales for blocks of activations.
        require(fields, "activation_scheme", ("dynamic",))
        return BlockFloat8Scheme(*block_size_of(fields, "weight_block_size"))
    activations = require(fields, "activation_scheme", ("static", "dynamic"))
    return Float8Scheme(
        is_per_output=False, activations="token" if activations == "dynamic" else "static"
    )
