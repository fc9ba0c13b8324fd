"""compressed-tensors: which modules have which of its formats, by `config_groups`."""

from collections.abc import Mapping
from typing import Any

from paged.models.errors import UnsupportedModelError
from paged.models.quantized.checkpoint_format import CheckpointFormat, LayerScheme
from paged.models.quantized.eight_bit_schemes import BlockFloat8Scheme, Float8Scheme, Int8Scheme
from paged.models.quantized.fields import (
    block_size_of,
    flag_of,
    group_size_of,
    module_patterns,
    names_of,
    refuse_filled,
    require,
)
from paged.models.quantized.packed_scheme import PackedScheme

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_ANY = ".*"
# Of keys and values, which are kept in more bits, and of layers before their compression.
_IGNORED_TENSORS = r"\.(k_scale|v_scale|output_scale)$"


def read_compressed_tensors(fields: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format that the `quantization_config` of such a checkpoint describes.

    Raises:
      UnsupportedModelError: if it is none that is implemented.

    Source: compressed-tensors, `quantization/quant_args.py` and `quant_config.py`.
    """
    layout = require(fields, "format", _FORMATS)
    require(fields, "quantization_status", ("compressed",), default="compressed")
    sparsity = fields.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"sparsity_config with format={sparsity['format']!r} is not implemented; supported: "
            "dense"
        )
    refuse_filled(fields, "transform_config", "rotations of weights and activations")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedModelError(f"config_groups={groups!r} holds no group")
    schemes = [
        (pattern, _scheme(group, layout))
        for group in groups.values()
        for pattern in _targets(group)
    ]
    # Names of modules before those of classes: the narrower rule counts.
    schemes.sort(key=lambda row: row[0] == _ANY)
    return CheckpointFormat(
        "compressed-tensors",
        tuple(schemes),
        module_patterns(names_of(fields, "ignore")),
        head=True,
        ignored_tensors=_IGNORED_TENSORS,
    )


def _targets(group: Mapping[str, Any]) -> list[str]:
    """Return patterns of modules; every one of ours that has a weight is a "Linear"."""
    names = names_of(group, "targets")
    return [_ANY if name == "Linear" else module_patterns([name])[0] for name in names]


def _scheme(group: Mapping[str, Any], layout: str) -> LayerScheme:
    layout = require(group, "format", _FORMATS, default=layout)
    refuse_filled(group, "output_activations", "results that are rounded")
    weights = group.get("weights") or {}
    kind = require(weights, "type", ("int", "float"))
    bits = require(weights, "num_bits", (8,) if kind == "float" else (4, 8))
    is_symmetric = flag_of(weights, "symmetric", default=True)
    if kind == "float" and weights.get("strategy") == "block":
        return _block_scheme(group, weights)
    activations = _activations(group, kind, bits)
    if layout == "pack-quantized":
        require(weights, "type", ("int",))
        refuse_filled(group, "input_activations", "activations rounded beside packed weights")
        require(weights, "strategy", ("channel", "group"))
        is_grouped = weights["strategy"] == "group"
        order = require(weights, "actorder", ("group", "weight", "static", False), default=False)
        return PackedScheme(
            bits,
            group_size_of(weights) if is_grouped else None,
            is_symmetric,
            is_act_order=order == "group",
        )
    require(weights, "num_bits", (8,))
    require(weights, "symmetric", (True,), default=True)
    is_per_output = require(weights, "strategy", ("tensor", "channel")) == "channel"
    if kind == "float":
        return Float8Scheme(is_per_output, activations)
    return Int8Scheme(is_per_output, rounds_activations=activations is not None)


def _block_scheme(group: Mapping[str, Any], weights: Mapping[str, Any]) -> LayerScheme:
    """Return e4m3 in blocks, with rows rounded by runs as long as a block, or as they are."""
    require(weights, "symmetric", (True,), default=True)
    block_outputs, block_inputs = block_size_of(weights, "block_structure")
    activations = group.get("input_activations")
    if activations:
        require(activations, "type", ("float",))
        require(activations, "num_bits", (8,))
        require(activations, "symmetric", (True,), default=True)
        require(activations, "dynamic", (True,))
        require(activations, "strategy", ("group",))
        require(activations, "group_size", (block_inputs,))
    return BlockFloat8Scheme(
        block_outputs, block_inputs, bool(activations), scale_name="weight_scale"
    )


def _activations(group: Mapping[str, Any], kind: str, bits: int) -> str | None:
    """Return how rows are rounded before a product: not (None), "token" or "static"."""
    fields = group.get("input_activations")
    if not fields:
        return None
    require(fields, "type", (kind,))
    require(fields, "num_bits", (bits,))
    require(fields, "symmetric", (True,), default=True)
    if flag_of(fields, "dynamic", default=False):
        return require(fields, "strategy", ("token",))
    if kind == "int":
        raise UnsupportedModelError(
            "input_activations of type 'int' that are static are not implemented; supported: "
            "dynamic with strategy 'token'"
        )
    require(fields, "strategy", ("tensor",))
    return "static"
