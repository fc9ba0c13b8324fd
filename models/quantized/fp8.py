"""The method "fp8" of AutoFP8 and its like: e4m3 with one scale for each tensor."""

from collections.abc import Mapping
from typing import Any

from paged.models.quantized.checkpoint_format import CheckpointFormat
from paged.models.quantized.eight_bit_schemes import Float8Scheme
from paged.models.quantized.fields import (
    module_patterns,
    names_of,
    refuse_filled,
    require,
)


def read_fp8(fields: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format that the `quantization_config` of an FP8 checkpoint describes.

    Raises:
      UnsupportedModelError: if it is none that is implemented.
    """
    refuse_filled(fields, "weight_block_size", "scales for blocks of weights, as DeepSeek's")
    require(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    activations = require(fields, "activation_scheme", ("static", "dynamic"))
    scheme = Float8Scheme(
        is_per_output=False, activations="token" if activations == "dynamic" else "static"
    )
    ignored = (*names_of(fields, "ignored_layers"), *names_of(fields, "modules_to_not_convert"))
    return CheckpointFormat(
        "fp8",
        ((".*", scheme),),
        module_patterns(ignored),
        ignored_tensors=r"\.(k_scale|v_scale|kv_scale|output_scale)$",
    )
