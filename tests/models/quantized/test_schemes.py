"""Tensors of each scheme, packed here code by code, become the weight that they stand for."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from paged.models.errors import CheckpointError
from paged.models.layers import Linear
from paged.models.parameters import parameter
from paged.models.quantization import QuantizedLayer
from paged.models.quantized.awq import AwqScheme
from paged.models.quantized.eight_bit_schemes import (
    BlockFloat8Scheme,
    Float8Scheme,
    Int8Scheme,
)
from paged.models.quantized.gptq import GptqScheme
from paged.models.quantized.packed_scheme import PackedScheme
from paged.models.quantized.reading import layer_tensors, read_layer, same_shape
from paged.models.tensor_places import TensorPlace
from tests.models.array_source import ArraySource

NUM_OUTPUTS, NUM_INPUTS, GROUP_SIZE = 16, 64, 32


def words(codes: list[int], bits: int) -> int:
    """One int32 of codes, the first in the lowest bits."""
    value = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def packed_along(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    def pack_line(line: np.ndarray) -> np.ndarray:
        per_word = 32 // bits
        parts = [words(line[i : i + per_word], bits) for i in range(0, len(line), per_word)]
        return np.array(parts, np.int32)

    return np.apply_along_axis(pack_line, axis, codes.astype(object)).astype(np.int32)


def rounded(seed: int, bits: int, group_size: int | None, *, has_zeros: bool):
    """Codes [outputs, inputs]; zeros and scales [outputs, groups]."""
    rng, num_groups = np.random.default_rng(seed), NUM_INPUTS // (group_size or NUM_INPUTS)
    codes = rng.integers(0, 2**bits, (NUM_OUTPUTS, NUM_INPUTS))
    zeros = rng.integers(0, 2**bits, (NUM_OUTPUTS, num_groups))
    zeros[0], zeros[1] = 0, 2**bits - 1
    if not has_zeros:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    return codes, zeros, scales


def widened(codes, zeros, scales, groups) -> np.ndarray:
    weight = np.zeros(codes.shape)
    for i, group in enumerate(groups):
        weight[:, i] = (codes[:, i] - zeros[:, group]) * scales[:, group].astype(np.float64)
    return weight


def read(scheme, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    shape = NUM_OUTPUTS, NUM_INPUTS
    expected = layer_tensors(scheme, "m", shape)
    assert {f"m.{name}" for name in tensors} == set(expected)
    for name, values in tensors.items():
        assert same_shape(values.shape, expected[f"m.{name}"]), name
    return read_layer(scheme, "m", shape, lambda name: tensors[name.removeprefix("m.")])


def module_of(scheme, tensors: dict[str, np.ndarray]) -> Any:
    parts = read(scheme, tensors)
    axes = scheme.form.axes(("mlp", "embed"), 1)
    abstract = scheme.form.quantize(jnp.zeros((NUM_OUTPUTS, NUM_INPUTS)), 1)
    assert {name: (part.shape, part.dtype) for name, part in parts.items()} == {
        name: (part.shape, part.dtype) for name, part in abstract.items()
    }
    return scheme.form.build(
        {name: parameter(jnp.asarray(part), axes[name]) for name, part in parts.items()}
    )


def check(scheme, tensors: dict[str, np.ndarray], weight: np.ndarray) -> None:
    stored = module_of(scheme, tensors)
    assert isinstance(stored, nnx.Module)
    product = stored.multiply(jnp.eye(NUM_INPUTS, dtype="float32"), NUM_OUTPUTS)
    np.testing.assert_allclose(np.asarray(product).T, weight, rtol=1e-6, atol=1e-7)
    rows = stored.rows(jnp.array([3, 0]), NUM_INPUTS, jnp.dtype("float32"))
    np.testing.assert_allclose(rows, weight[[3, 0]], rtol=1e-6, atol=1e-7)


NEIGHBOURS = np.arange(NUM_INPUTS) // GROUP_SIZE


def gptq_tensors(codes, zeros, scales, groups, bits: int, offset: int = 1):
    return {
        "qweight": packed_along(codes.T, bits, 0),
        "qzeros": packed_along((zeros.T - offset) % 2**bits, bits, 1),
        "scales": scales.T,
        "g_idx": np.asarray(groups, np.int32),
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_act_order", [True, False])
def test_gptq(bits: int, is_symmetric: bool, is_act_order: bool):
    groups = np.random.default_rng(5).permutation(NEIGHBOURS) if is_act_order else NEIGHBOURS
    made = rounded(0, bits, GROUP_SIZE, has_zeros=not is_symmetric)
    tensors = gptq_tensors(*made, groups, bits)
    scheme = GptqScheme(bits, GROUP_SIZE, is_symmetric, is_act_order, 1)
    check(scheme, tensors, widened(*made, groups))


def test_gptq_with_zero_points_as_they_are():
    made = rounded(1, 4, GROUP_SIZE, has_zeros=True)
    tensors = gptq_tensors(*made, NEIGHBOURS, 4, offset=0)
    check(GptqScheme(4, GROUP_SIZE, False, False, 0), tensors, widened(*made, NEIGHBOURS))


def test_gptq_with_one_group():
    made = rounded(2, 4, None, has_zeros=True)
    one = np.zeros(NUM_INPUTS, int)
    check(GptqScheme(4, None, False, True, 1), gptq_tensors(*made, one, 4), widened(*made, one))


def test_awq():
    codes, zeros, scales = rounded(3, 4, GROUP_SIZE, has_zeros=True)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    eights = [8 * word + column for word in range(NUM_OUTPUTS // 8) for column in order]
    tensors = {
        "qweight": packed_along(codes.T[:, eights], 4, 1),
        "qzeros": packed_along(zeros.T[:, eights], 4, 1),
        "scales": scales.T,
    }
    check(AwqScheme(GROUP_SIZE), tensors, widened(codes, zeros, scales, NEIGHBOURS))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [GROUP_SIZE, None])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_act_order", [True, False])
def test_packed(bits: int, group_size: int | None, is_symmetric: bool, is_act_order: bool):
    groups = np.arange(NUM_INPUTS) // (group_size or NUM_INPUTS)
    if is_act_order and group_size is None:
        return  # there is nothing to order
    if is_act_order:
        groups = np.random.default_rng(6).permutation(groups)
    codes, zeros, scales = rounded(4, bits, group_size, has_zeros=not is_symmetric)
    tensors = {
        "weight_packed": packed_along(codes, bits, 1),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = packed_along(zeros, bits, 0)
    if is_act_order:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    weight = widened(codes, zeros, tensors["weight_scale"], groups)
    check(PackedScheme(bits, group_size, is_symmetric, is_act_order), tensors, weight)


@pytest.mark.parametrize("is_per_output", [True, False])
def test_float8(is_per_output: bool):
    rng = np.random.default_rng(7)
    values = rng.standard_normal((NUM_OUTPUTS, NUM_INPUTS)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.1, (NUM_OUTPUTS, 1) if is_per_output else ()).astype(np.float32)
    tensors = {"weight": values, "weight_scale": scale}
    check(Float8Scheme(is_per_output, None), tensors, values.astype(np.float64) * scale)


def float8_blocks(block_outputs: int, block_inputs: int) -> tuple[dict[str, np.ndarray], Any]:
    """Tensors, and the weight block by block; the last blocks of outputs may be cut short."""
    rng = np.random.default_rng(10)
    values = rng.standard_normal((NUM_OUTPUTS, NUM_INPUTS)).astype(ml_dtypes.float8_e4m3fn)
    num_blocks = -(-NUM_OUTPUTS // block_outputs), NUM_INPUTS // block_inputs
    scales = rng.uniform(0.01, 0.1, num_blocks).astype(np.float32)
    weight = np.zeros(values.shape)
    for n, k in np.ndindex(values.shape):
        weight[n, k] = float(values[n, k]) * scales[n // block_outputs, k // block_inputs]
    return {"weight": values, "weight_scale_inv": scales}, weight


@pytest.mark.parametrize("block", [(8, 32), (10, 16), (128, NUM_INPUTS)])
def test_float8_in_blocks(block: tuple[int, int]):
    tensors, weight = float8_blocks(*block)
    check(BlockFloat8Scheme(*block, rounds_activations=False), tensors, weight)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_rows_are_rounded_to_float8_run_by_run(dtype: str, tolerance: float):
    tensors, weight = float8_blocks(8, 32)
    stored = module_of(BlockFloat8Scheme(8, 32), tensors)
    x = np.random.default_rng(11).standard_normal((5, NUM_INPUTS)) * [[1], [1e-6], [300], [1], [1]]
    x[3, :32] *= 1000  # beside which the other run would be rounded to little
    x[4, 32:] = 0
    x = jnp.asarray(x, dtype)
    expected = np.zeros((5, NUM_OUTPUTS))
    for row, run in np.ndindex(5, 2):
        inputs = slice(32 * run, 32 * run + 32)
        part = np.asarray(x[row, inputs], np.float32)
        scale = np.abs(part).max() / np.float32(448)
        codes = (part / (scale or 1)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        expected[row] += codes @ weight[:, inputs].T * scale
    got = np.asarray(stored.multiply(x, NUM_OUTPUTS))
    size = np.abs(expected).max(axis=1, keepdims=True)
    np.testing.assert_allclose(got / size, expected / size, atol=tolerance)


def test_float8_in_blocks_is_not_packed():
    stored = module_of(BlockFloat8Scheme(8, 32), float8_blocks(8, 32)[0])
    assert not stored.can_pack
    with pytest.raises(NotImplementedError, match="cannot be packed; check can_pack first"):
        stored.matrix()
    with pytest.raises(NotImplementedError, match="cannot be packed; check can_pack first"):
        stored.packed(NUM_OUTPUTS)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_weight_in_full_is_rounded_to_float8_by_blocks_of_inputs(block_size: int):
    weight = np.random.default_rng(12).standard_normal((6, 4, NUM_INPUTS)).astype(np.float32)
    parts = BlockFloat8Scheme(1, block_size).form.quantize(jnp.asarray(weight), 2)
    scales = np.repeat(np.asarray(parts["scales"]).T, block_size, axis=1)
    values = np.asarray(parts["values"]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    error = np.abs(values * scales - weight.reshape(24, -1))
    # Half a step of e4m3, whose numbers have four digits; the smallest are multiples of 2 ** -9.
    assert (error <= np.abs(weight.reshape(24, -1)) / 16 + scales * 2.0**-10).all()


def test_int8():
    rng = np.random.default_rng(8)
    values = rng.integers(-128, 128, (NUM_OUTPUTS, NUM_INPUTS), np.int8)
    scale = rng.uniform(0.01, 0.1, (NUM_OUTPUTS, 1)).astype(np.float32)
    tensors = {"weight": values, "weight_scale": scale}
    check(Int8Scheme(True, False), tensors, values.astype(np.float64) * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_rounded_to_int8_each_by_its_largest(dtype: str):
    rng = np.random.default_rng(9)
    values = rng.integers(-128, 128, (NUM_OUTPUTS, NUM_INPUTS), np.int8)
    scale = rng.uniform(0.01, 0.1, (NUM_OUTPUTS, 1)).astype(np.float32)
    stored = module_of(Int8Scheme(True, True), {"weight": values, "weight_scale": scale})
    x = jnp.asarray(rng.standard_normal((5, NUM_INPUTS)), dtype).at[4].set(0)
    wide = np.asarray(x, np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    rows = np.round(wide * 127 / np.where(largest == 0, 1, largest)) * largest / 127
    expected = rows @ (values.astype(np.float64) * scale).T
    np.testing.assert_allclose(stored.multiply(x, NUM_OUTPUTS), expected, rtol=1e-4, atol=1e-3)


def test_rows_are_clipped_by_a_static_scale():
    values = np.eye(NUM_OUTPUTS, NUM_INPUTS).astype(ml_dtypes.float8_e4m3fn)
    tensors = {
        "weight": values,
        "weight_scale": np.float32(2).reshape(1),
        "input_scale": np.float32(0.5).reshape(()),
    }
    stored = module_of(Float8Scheme(False, "static"), tensors)
    x = jnp.zeros((1, NUM_INPUTS)).at[0, :4].set(jnp.array([1000.0, -1000.0, 1.0, 1.06]))
    # 448 is the largest e4m3; 2.12 becomes 2, whose neighbours are 1.875 and 2.25.
    product = np.asarray(stored.multiply(x, NUM_OUTPUTS))[0, :4]
    np.testing.assert_array_equal(product, [448, -448, 2, 2])


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        (GptqScheme(4, 32, True, False, 1), {"qzeros": 0}, "qzeros holds other zero points than 8"),
        (GptqScheme(4, 32, True, False, 1), {"g_idx": 0}, "g_idx does not put 32 inputs into each"),
        (GptqScheme(4, 32, True, True, 1), {"g_idx": 1}, "g_idx does not put 32 inputs into each"),
        (
            GptqScheme(4, 32, True, False, 1),
            {"g_idx": np.arange(NUM_INPUTS, dtype=np.int32) % 2},
            "g_idx is not in order, but desc_act is false",
        ),
        (
            GptqScheme(4, 32, True, False, 1),
            {"qweight": np.zeros((8, 16), np.float32)},
            "tensor m.qweight has element type float32; .* asks for int32",
        ),
    ],
)
def test_gptq_values_that_cannot_be_are_named(scheme, change: dict[str, Any], message: str):
    made = rounded(0, 4, GROUP_SIZE, has_zeros=False)
    tensors = gptq_tensors(*made, NEIGHBOURS, 4)
    for name, value in change.items():
        tensors[name] = np.broadcast_to(value, tensors[name].shape)
        if np.isscalar(value):
            tensors[name] = tensors[name].astype(np.int32)
    with pytest.raises(CheckpointError, match=message):
        read(scheme, tensors)


def test_other_values_that_cannot_be_are_named():
    packed = {
        "weight_packed": np.zeros((NUM_OUTPUTS, NUM_INPUTS // 8), np.int32),
        "weight_scale": np.ones((NUM_OUTPUTS, 2), np.float16),
        "weight_shape": np.array([NUM_INPUTS, NUM_OUTPUTS]),
    }
    with pytest.raises(CheckpointError, match=r"m: weight_shape is \[64 16\], not \(16, 64\)"):
        read(PackedScheme(4, GROUP_SIZE, True, False), packed)
    float8 = {
        "weight": np.zeros((NUM_OUTPUTS, NUM_INPUTS), ml_dtypes.float8_e4m3fn),
        "weight_scale": np.ones(1, np.float32),
        "input_scale": np.zeros(1, np.float32),
    }
    with pytest.raises(CheckpointError, match=r"m: input_scale is 0.0, not more than 0"):
        read(Float8Scheme(False, "static"), float8)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (AwqScheme(32), (12, 64), "12 outputs are no multiple of the 8 in a word"),
        (AwqScheme(32), (16, 48), "48 inputs cannot be cut into even groups of 32"),
        (GptqScheme(4, 32, True, False, 1), (12, 64), "12 x 64 weights do not fill words of 8"),
        (GptqScheme(8, 32, True, False, 1), (12, 48), "48 inputs cannot be cut"),
        (PackedScheme(4, 32, False, False), (12, 64), "12 x 64 weights do not fill words of 8"),
        (PackedScheme(4, 32, True, False), (12, 64), None),
        (Float8Scheme(True, None), (13, 7), None),
        (BlockFloat8Scheme(8, 32), (13, 64), None),
        (BlockFloat8Scheme(8, 32), (16, 48), "48 inputs cannot be cut into blocks of 32"),
        (Int8Scheme(True, False), (13, 7), None),
    ],
)
def test_shapes_that_cannot_be_stored_so_have_a_reason(scheme, shape, message: str | None):
    reason = scheme.problem(*shape)
    assert (reason is None) == (message is None)
    assert (reason or "").startswith(message or "")


@pytest.mark.parametrize(
    "scheme",
    [
        GptqScheme(4, GROUP_SIZE, False, True, 1),
        Float8Scheme(True, "static"),
        BlockFloat8Scheme(10, 32),
    ],
)
def test_one_of_several_weights_in_a_tensor_is_its_outputs(scheme):
    groups = np.random.default_rng(5).permutation(NEIGHBOURS)
    if isinstance(scheme, GptqScheme):
        made = rounded(0, 4, GROUP_SIZE, has_zeros=True)
        tensors = gptq_tensors(*made, groups, 4)
    elif isinstance(scheme, BlockFloat8Scheme):
        tensors, _ = float8_blocks(10, 32)
    else:
        rng = np.random.default_rng(7)
        tensors = {
            "weight": rng.standard_normal((NUM_OUTPUTS, NUM_INPUTS)).astype("float8_e4m3fn"),
            "weight_scale": rng.uniform(0.01, 0.1, (NUM_OUTPUTS, 1)).astype(np.float32),
            "input_scale": np.ones(1, np.float32),
        }
    source = ArraySource({f"m.{name}": values for name, values in tensors.items()})
    layer = QuantizedLayer(
        ("w",),
        Linear("TD,FD->TF", {"f": 8, "d": NUM_INPUTS}, dtype="float32", rngs=nnx.Rngs(0)),
        scheme.form,
        "m",
        scheme,
    )
    place = TensorPlace("m.weight", (8, NUM_INPUTS), (NUM_OUTPUTS, NUM_INPUTS), 4, 12)
    whole, parts = module_of(scheme, tensors), place.read_quantized(source, layer)
    part = scheme.form.build(
        {
            name: parameter(jnp.asarray(values), (None,) * values.ndim)
            for name, values in parts.items()
        }
    )
    x = jnp.asarray(np.random.default_rng(3).standard_normal((5, NUM_INPUTS)), "float32")
    expected = np.asarray(whole.multiply(x, NUM_OUTPUTS))[:, 4:12]
    np.testing.assert_allclose(part.multiply(x, 8), expected, rtol=1e-6, atol=1e-6)
