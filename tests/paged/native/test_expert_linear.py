"""The native layers of experts equal numpy in float64, at every instruction set of this CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.native import library
from paged.native.expert_linear import pack_experts, packed_expert_linear
from paged.native.linear import PackedWeight
from tests.paged.native.test_linear import (
    LEVELS,
    ROUNDING,
    Layer,
    check,
    int4_layer,
    random,
)

NUM_INPUTS = 33
# What the type of experts' weights and x's type may be together.
TYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("float8_e4m3fn", "float32"),
    ("float8_e4m3fn", "bfloat16"),
]
# Rows of each expert, in 40 with one at the end that is nobody's.
GROUPS = {"uneven": [1, 0, 26, 12], "one": [0, 0, 39, 0], "none": [0, 0, 0, 0]}


@pytest.fixture(params=LEVELS, ids=library.LEVELS)
def level(native, request) -> int:
    """A test runs once per instruction set that this CPU has."""
    if request.param > library.best_level():
        pytest.skip(f"this CPU lacks {library.LEVELS[request.param]}")
    return request.param


def stack(layers: list[Layer]) -> PackedWeight:
    """The packed weights of layers of one shape."""
    first = layers[0].packed
    scales, bias = (
        None
        if getattr(first, name) is None
        else np.stack([getattr(x.packed, name) for x in layers])
        for name in ("scales", "bias")
    )
    words = pack_experts(np.stack([layer.values for layer in layers]))
    return PackedWeight(words, first.num_outputs, scales, bias)


def make_layers(num_outputs: int, types: tuple[str, str], seed: int, with_bias: bool):
    shape = (num_outputs, NUM_INPUTS)
    return [Layer(seed + i, shape, types, with_bias=with_bias) for i in range(4)]


def rows_of(sizes: list[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_group_is_multiplied_by_its_experts_weight(level, types, with_bias):
    layers = make_layers(70, types, 0, with_bias)
    x = random(np.random.default_rng(9), (40, NUM_INPUTS), types[1])

    @jax.jit
    def calls(x, weight):
        return [
            packed_expert_linear(
                x,
                jnp.cumsum(jnp.array(sizes, jnp.int32)),
                [weight._replace(num_outputs=70)],
                level=level,
            )
            for sizes in GROUPS.values()
        ]

    for sizes, y in zip(GROUPS.values(), calls(x, stack(layers)), strict=True):
        y = np.asarray(y).astype(np.float64)
        for rows, layer in zip(rows_of(sizes), layers, strict=True):
            check(y[rows], layer(x[rows]), layer.size(x[rows]), types[1])
        assert not y[sum(sizes) :].any()


def activate(name: str, gate: np.ndarray, value: np.ndarray) -> np.ndarray:
    if name == "clamped_swiglu":
        gate, value = np.minimum(gate, 3), np.clip(value, -3, 3)
        return gate / (1 + np.exp(-1.702 * gate)) * (value + 1)
    return gate / (1 + np.exp(-gate)) * value


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_gates_of_experts(level, types, activation):
    gates, values = make_layers(65, types, 0, True), make_layers(65, types, 50, True)
    x = random(np.random.default_rng(9), (40, NUM_INPUTS), types[1])
    sizes = GROUPS["uneven"]
    y = packed_expert_linear(
        x,
        jnp.cumsum(jnp.array(sizes, jnp.int32)),
        [stack(gates), stack(values)],
        activation=activation,
        gate_slope=1.702,
        gate_limit=3.0,
        level=level,
    )
    y = np.asarray(y).astype(np.float64)
    for rows, gate, value in zip(rows_of(sizes), gates, values, strict=True):
        g, v = gate(x[rows]), value(x[rows])
        expected = activate(activation, g, v)
        # Errors of either product, times how much the result follows it: at most about 1.1 of
        # the other's size for a gate of no more than 3, or for silu.
        error = 2**-20 * (
            gate.size(x[rows]) * (np.abs(v) + 1) + value.size(x[rows]) * (np.abs(g) + 1)
        )
        allowed = ROUNDING[types[1]] * np.abs(expected) + 2 * error
        assert (np.abs(y[rows] - expected) <= allowed).all()
    assert not y[sum(sizes) :].any()


def stacked_codes(seed: int, has_zeros: bool) -> tuple[PackedWeight, list[np.ndarray]]:
    """Four experts in codes of 4 bits, 70 outputs and 64 inputs in groups of 32."""
    rng = np.random.default_rng(seed)
    layers = [int4_layer(rng, 70, 64, 32, has_zeros) for _ in range(4)]
    parts = (
        None
        if getattr(layers[0][0], name) is None
        else np.stack([getattr(packed, name) for packed, _ in layers])
        for name in ("words", "scales", "zeros")
    )
    words, scales, zeros = parts
    return PackedWeight(words, 70, scales, zeros=zeros), [weight for _, weight in layers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_zeros", [(True, True), (False, True), (False, False)])
def test_experts_in_codes_of_4_bits(level, dtype: str, has_zeros: tuple[bool, bool]):
    (gate, gates), (up, ups) = (stacked_codes(i, z) for i, z in enumerate(has_zeros))
    x = random(np.random.default_rng(9), (40, 64), dtype)
    sizes = GROUPS["uneven"]
    ends = jnp.cumsum(jnp.array(sizes, jnp.int32))
    plain = np.asarray(packed_expert_linear(x, ends, [gate], level=level)).astype(np.float64)
    gated = np.asarray(
        packed_expert_linear(x, ends, [gate, up], activation="silu", level=level)
    ).astype(np.float64)
    wide = x.astype(np.float64)
    for rows, w, v in zip(rows_of(sizes), gates, ups, strict=True):
        g, u = wide[rows] @ w.T, wide[rows] @ v.T
        g_size, u_size = (np.abs(wide[rows]) @ np.abs(m).T + 1 for m in (w, v))
        # What zero points take away is summed apart, of larger numbers than the result's.
        allowed = ROUNDING[dtype] * np.abs(g) + 2**-16 * g_size
        assert (np.abs(plain[rows] - g) <= allowed).all()
        expected = activate("silu", g, u)
        allowed = ROUNDING[dtype] * np.abs(expected) + 2**-15 * (
            g_size * (np.abs(u) + 1) + u_size * (np.abs(g) + 1)
        )
        assert (np.abs(gated[rows] - expected) <= allowed).all()
    assert not plain[sum(sizes) :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": np.zeros((3, 2, 33, 64, 1), np.float32)}, "do not fit each other"),
        ({"words": np.zeros((4, 2, 33, 64, 1), np.float16)}, "must have the type of x, or int8"),
        (
            {"words": np.zeros((4, 2, 5, 64, 4), np.uint8)},
            "scales of 4-bit weights must be float32",
        ),
        ({"bias": np.zeros((4, 69), np.float32)}, "a bias has another type or shape"),
        ({"num_outputs": 500}, "do not fit each other"),
    ],
)
def test_operands_that_do_not_fit_are_refused(native, change, message):
    weight = stack(make_layers(70, ("float32", "float32"), 0, True))._replace(**change)
    x = np.zeros((40, NUM_INPUTS), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(packed_expert_linear(x, np.zeros(4, np.int32), [weight]))


def test_ends_of_groups_that_are_not_in_order_write_nothing_outside(native):
    layers = make_layers(70, ("float32", "float32"), 0, False)
    x = random(np.random.default_rng(9), (40, NUM_INPUTS), "float32")
    y = np.asarray(packed_expert_linear(x, np.array([-5, 10, 3, 900], np.int32), [stack(layers)]))
    check(y[:10], layers[1](x[:10]), layers[1].size(x[:10]), "float32")
    check(y[10:], layers[3](x[10:]), layers[3].size(x[10:]), "float32")
