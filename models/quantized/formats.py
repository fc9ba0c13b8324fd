"""`read_quantization`: the formats of quantised checkpoints that can be read, by method."""

from collections.abc import Callable, Mapping
from typing import Any

from paged.models.errors import UnsupportedModelError
from paged.models.quantized.awq import read_awq
from paged.models.quantized.checkpoint_format import CheckpointFormat
from paged.models.quantized.compressed_tensors import read_compressed_tensors
from paged.models.quantized.fp8 import read_fp8
from paged.models.quantized.gptq import read_gptq

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
}
"""`quant_method` of a config -> what reads the rest of it."""

SUPPORTED = (
    "awq (4 bits, gemm), gptq (4 and 8 bits), compressed-tensors (int4 and int8 packed; float8 and "
    "int8 by tensor or channel, with dynamic activations by token, float8 also static, and by "
    "block) and fp8 (by tensor or block)"
)
"""What the formats hold, for errors."""


def read_quantization(config: Mapping[str, Any]) -> CheckpointFormat | None:
    """Return how a checkpoint is quantised, by the `quantization_config` of its config.json.

    Returns:
      The format, or None if it is not quantised.

    Raises:
      UnsupportedModelError: if it is quantised in another way.
    """
    fields = config.get("quantization_config", config.get("compression_config"))
    if fields is None:
        return None
    method = fields.get("quant_method", "?") if isinstance(fields, Mapping) else "?"
    reader = FORMATS.get(str(method))
    if reader is None:
        raise UnsupportedModelError(
            f"quantization_config (quant_method={method!r}) is not implemented; supported: "
            f"{SUPPORTED}. Use another checkpoint, or an unquantized one with --quantization."
        )
    try:
        return reader(fields)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"quantization_config (quant_method={method!r}): {error}. Implemented are {SUPPORTED}."
        ) from None
