"""What a `quantization_config` means: schemes by module, and what is refused with the reason."""

import copy
from typing import Any

import pytest

from paged.models.errors import UnsupportedModelError
from paged.models.quantized.awq import AwqScheme
from paged.models.quantized.eight_bit_schemes import (
    BlockFloat8Scheme,
    Float8Scheme,
    Int8Scheme,
)
from paged.models.quantized.formats import read_quantization
from paged.models.quantized.gptq import GptqScheme
from paged.models.quantized.packed_scheme import PackedScheme

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [128, 64]}
RUNS = FLOAT8 | {"strategy": "group", "group_size": 64, "dynamic": True}
DYNAMIC_FP8 = FP8 | {"activation_scheme": "dynamic"}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def compressed(
    weights: dict[str, Any], activations: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **fields,
    }


def scheme(fields: dict[str, Any], module: str = Q_PROJ) -> Any:
    quantization = read_quantization({"quantization_config": fields})
    assert quantization is not None
    assert hash(quantization) == hash(read_quantization({"quantization_config": fields}))
    assert quantization.method == fields["quant_method"]
    return quantization.scheme(module)


TOKEN8 = FLOAT8 | {"dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (AWQ, AwqScheme(128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, AwqScheme(64)),
        (GPTQ, GptqScheme(4, 128, True, False, 1)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "sym": False, "desc_act": True},
            GptqScheme(8, None, False, True, 1),
        ),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, GptqScheme(4, 128, True, False, 0)),
        (FP8, Float8Scheme(False, "static")),
        (FP8 | {"activation_scheme": "dynamic"}, Float8Scheme(False, "token")),
        (DYNAMIC_FP8 | {"weight_block_size": [128, 64]}, BlockFloat8Scheme(128, 64)),
        (
            compressed(BLOCKS, format="float-quantized"),
            BlockFloat8Scheme(128, 64, False, "weight_scale"),
        ),
        (
            compressed(BLOCKS, RUNS, format="float-quantized"),
            BlockFloat8Scheme(128, 64, True, "weight_scale"),
        ),
        (compressed(INT4), PackedScheme(4, 64, True, False)),
        (compressed(INT4 | {"symmetric": False}), PackedScheme(4, 64, False, False)),
        (compressed(INT4 | {"actorder": "group"}), PackedScheme(4, 64, True, True)),
        (compressed(INT4 | {"actorder": "weight"}), PackedScheme(4, 64, True, False)),
        (compressed(INT8), PackedScheme(8, None, True, False)),
        (compressed(FLOAT8, format="float-quantized"), Float8Scheme(False, None)),
        (compressed(FLOAT8, FLOAT8, format="float-quantized"), Float8Scheme(False, "static")),
        (
            compressed(FLOAT8 | {"strategy": "channel"}, TOKEN8, format="float-quantized"),
            Float8Scheme(True, "token"),
        ),
        (compressed(INT8, format="int-quantized"), Int8Scheme(True, False)),
        (
            compressed(INT8, INT8 | {"strategy": "token", "dynamic": True}, format="int-quantized"),
            Int8Scheme(True, True),
        ),
    ],
)
def test_config_is_understood(fields: dict[str, Any], expected: Any):
    assert scheme(fields) == expected


@pytest.mark.parametrize(
    ("fields", "module"),
    [
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, Q_PROJ),
        (AWQ, "lm_head"),
        (GPTQ, "lm_head"),
        (GPTQ | {"dynamic": {r"-:.*\.self_attn\.": {}, "-:.*gate$": {}}}, Q_PROJ),
        (FP8 | {"ignored_layers": [Q_PROJ]}, Q_PROJ),
        (compressed(INT4), "lm_head"),
        (compressed(INT4, ignore=["re:.*self_attn.*"]), Q_PROJ),
        (compressed(INT4, ignore=[Q_PROJ]), Q_PROJ),
    ],
)
def test_module_is_left_as_it_is(fields: dict[str, Any], module: str):
    assert scheme(fields, module) is None
    assert scheme(fields, "model.layers.0.mlp.up_proj") is not None


def test_head_is_quantised_where_the_config_says_so():
    assert scheme(GPTQ | {"lm_head": True}, "lm_head") == scheme(GPTQ)
    assert scheme(compressed(INT4, ignore=[]), "lm_head") == PackedScheme(4, 64, True, False)


def test_name_in_the_targets_counts_before_the_class():
    fields = compressed(INT4)
    fields["config_groups"]["narrow"] = {"targets": ["re:.*q_proj"], "weights": INT8}
    assert scheme(fields) == PackedScheme(8, None, True, False)
    assert scheme(fields, "model.layers.0.mlp.up_proj") == PackedScheme(4, 64, True, False)


def test_checkpoint_in_full_has_no_format():
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'.* supported: awq"),
        ({}, r"quant_method='\?'"),
        (AWQ | {"bits": 8}, "bits=8 is not implemented; supported: 4"),
        (AWQ | {"version": "gemv"}, "version='gemv' is not implemented; supported: 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point=False is not implemented"),
        (AWQ | {"group_size": "all"}, "group_size='all' cannot be"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' is no li"),
        (GPTQ | {"bits": 3}, "bits=3 is not implemented; supported: 4, 8"),
        (GPTQ | {"sym": "yes"}, "sym='yes' is not implemented; supported: True, False"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not implemented"),
        (
            GPTQ | {"dynamic": {"-:x": {}, "+:y": {"bits": 8}}},
            r"dynamic=\['\+:y'\] \(rules for single modules\)",
        ),
        (FP8 | {"weight_block_size": [128, 128]}, "activation_scheme='static' is not implemented"),
        (DYNAMIC_FP8 | {"weight_block_size": 128}, "weight_block_size=128 cannot be"),
        (DYNAMIC_FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\] cannot be"),
        (DYNAMIC_FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' is not implemented"),
        (FP8 | {"activation_scheme": "?"}, r"activation_scheme='\?' is not implemented"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' is not implemented"),
        (compressed(INT4, format="marlin-24"), "format='marlin-24' is not implemented"),
        (compressed(INT4, quantization_status="frozen"), "quantization_status='frozen'"),
        (
            compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config with format='sparse-24-bitmask' is not implemented",
        ),
        (compressed(INT4, transform_config={"a": 1}), "transform_config=.* is not implemented"),
        (compressed(INT4, config_groups={}), r"config_groups=\{\} holds no group"),
        (compressed(INT4 | {"num_bits": 2}), "num_bits=2 is not implemented; supported: 4, 8"),
        (compressed(INT4 | {"strategy": "block"}), "strategy='block' is not implemented"),
        (compressed(INT4, TOKEN8), "type='float' is not implemented; supported: 'int'"),
        (
            compressed(INT8, INT8 | {"dynamic": True, "strategy": "token"}),
            "input_activations=.*activations rounded beside packed weights",
        ),
        (
            compressed(INT8, INT8 | {"strategy": "tensor"}, format="int-quantized"),
            "input_activations of type 'int' that are static are not implemented",
        ),
        (
            compressed(FLOAT8, FLOAT8 | {"dynamic": True}, format="float-quantized"),
            "strategy='tensor' is not implemented; supported: 'token'",
        ),
        (
            compressed(FLOAT8 | {"strategy": "token"}, format="float-quantized"),
            "strategy='token' is not implemented; supported: 'tensor', 'channel'",
        ),
        (
            compressed(BLOCKS | {"block_structure": None}, format="float-quantized"),
            "block_structure=None cannot be",
        ),
        (
            compressed(BLOCKS, RUNS | {"group_size": 128}, format="float-quantized"),
            "group_size=128 is not implemented; supported: 64",
        ),
        (
            compressed(BLOCKS, RUNS | {"dynamic": False}, format="float-quantized"),
            "dynamic=False is not implemented; supported: True",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_with_what_is(fields: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message) as error:
        read_quantization({"quantization_config": copy.deepcopy(fields)})
    assert "compressed-tensors (int4 and int8 packed" in str(error.value)
    assert "\n" not in str(error.value)
