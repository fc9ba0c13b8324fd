"""The mixture of experts against a loop over tokens in numpy, and what it multiplies and reads."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.models.branch import Branch
from paged.models.expert_groups import map_groups, sort_pairs
from paged.models.group_routing import choose_in_groups
from paged.models.layers import RMSNorm
from paged.models.moe import SparseMLP
from paged.models.moe_config import ExpertsConfig, GroupRouting
from paged.models.quantized.form import store
from paged.models.quantized.int8_weight import Int8Form
from paged.native.expert_linear import pack_experts

HIDDEN = 24
SOFTMAX = ExpertsConfig(num_experts=5, num_experts_per_token=2, intermediate_size=40)
CONFIGS = {
    "normalized": SOFTMAX,
    "not_normalized": replace(SOFTMAX, normalize=False),
    "clamped": replace(
        SOFTMAX,
        num_experts_per_token=3,
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        swiglu_limit=1.5,
    ),
    "all": replace(SOFTMAX, num_experts_per_token=5),
}


def make_layer(config: ExpertsConfig, dtype: str = "float32") -> SparseMLP:
    """A layer of which no bias is zero."""
    layer = SparseMLP(HIDDEN, config, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), dtype), state)
    return nnx.merge(graphdef, state)


def reference(layer: SparseMLP, config: ExpertsConfig, x: np.ndarray) -> np.ndarray:
    """`x + mixture(norm(x))` token by token, in float64."""
    p: Any = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(layer))
    )
    x = np.asarray(x, np.float64)
    result = x.copy()
    for token, row in enumerate(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)):
        scores = p["router"]["weight"] @ row + p["router"].get("bias", 0)
        probabilities = np.exp(scores) / np.exp(scores).sum()
        chosen = np.argsort(-probabilities)[: config.num_experts_per_token]
        divisor = probabilities[chosen].sum() if config.normalize else 1
        for expert in chosen:

            def linear(name: str, value: np.ndarray, expert: int = expert) -> np.ndarray:
                weights = p["experts"][name]
                bias = weights["bias"][expert] if "bias" in weights else 0
                return weights["weight"][expert] @ value + bias

            gate, up = linear("gate_proj", row), linear("up_proj", row)
            if config.activation == "silu":
                mixed = gate / (1 + np.exp(-gate)) * up
            else:
                gate = np.minimum(gate, config.swiglu_limit)
                up = np.clip(up, -config.swiglu_limit, config.swiglu_limit)
                mixed = gate / (1 + np.exp(-config.swiglu_alpha * gate)) * (up + 1)
            scale = probabilities[expert] / divisor
            result[token] += scale * linear("down_proj", mixed)
    return result


def run(layer: SparseMLP, x: np.ndarray, num_rows: int) -> np.ndarray:
    """Call the layer with the float32 stream x."""
    dtype = str(layer.router.weight.dtype)
    branch = Branch(dtype, RMSNorm({"embed": HIDDEN}, epsilon=1e-6, dtype=dtype))

    @jax.jit
    def call(layer: SparseMLP, x: jax.Array, num_rows: jax.Array) -> jax.Array:
        return layer(x, branch, num_rows)

    return np.asarray(call(layer, jnp.asarray(x, "float32"), jnp.array([num_rows], jnp.int32)))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 7, 90])
def test_mixture_equals_a_loop_over_tokens(name: str, num_rows: int):
    config = CONFIGS[name]
    layer = make_layer(config)
    x = np.random.default_rng(1).standard_normal((num_rows, HIDDEN)).astype(np.float32)
    # float32 sums of 40 products, about 1 each.
    np.testing.assert_allclose(
        run(layer, x, num_rows), reference(layer, config, x), atol=2e-5, rtol=1e-5
    )


def test_bfloat16_mixture_is_within_rounding():
    layer = make_layer(SOFTMAX, "bfloat16")
    x = np.asarray(np.random.default_rng(1).standard_normal((20, HIDDEN)), jnp.bfloat16)
    errors = np.abs(run(layer, x, 20).astype(np.float64) - reference(layer, SOFTMAX, x))
    assert np.median(errors) < 0.02
    assert errors.mean() < 0.1  # a near tie may choose another expert


def test_padding_is_not_routed_even_if_it_is_not_a_number():
    layer = make_layer(SOFTMAX)
    x = np.random.default_rng(1).standard_normal((12, HIDDEN)).astype(np.float32)
    x[7:] = np.nan
    y = run(layer, x, 7)
    np.testing.assert_allclose(y[:7], reference(layer, SOFTMAX, x[:7]), atol=2e-5, rtol=1e-5)
    pairs = sort_pairs(jnp.zeros((12, 2), jnp.int32), jnp.array([7], jnp.int32), 5)
    assert pairs.group_ends.tolist() == [14] * 5


def test_pairs_are_sorted_by_expert_and_foreign_ones_are_in_no_group():
    chosen = np.random.default_rng(0).integers(-1, 6, (30, 3)).astype(np.int32)
    pairs = jax.jit(sort_pairs, static_argnums=2)(
        jnp.asarray(chosen), jnp.array([25], jnp.int32), 5
    )
    start = 0
    for expert, end in enumerate(pairs.group_ends.tolist()):
        assert pairs.rows[start:end].tolist() == np.nonzero(chosen[:25] == expert)[0].tolist()
        start = end
    is_computed = np.asarray(pairs.is_computed)
    assert (is_computed == ((np.arange(30) < 25)[:, None] & (chosen >= 0) & (chosen < 5))).all()
    assert (np.asarray(pairs.rows)[np.asarray(pairs.places)] == np.arange(30)[:, None]).all()
    assert (np.asarray(pairs.places)[is_computed] < start).all()


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 1, 0], [64, 0, 0], [3, 0, 61], [9, 30, 20]])
def test_each_group_is_computed_by_its_expert_and_nothing_else_is(sizes: list[int]):
    x = np.random.default_rng(0).standard_normal((64, 2)).astype(np.float32)
    ends = jnp.cumsum(jnp.array(sizes, jnp.int32))
    seen: list[int] = []

    def add_number(expert: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda number: seen.append(int(number)), expert)
        return x + expert.astype(jnp.float32) + 1

    y = map_groups(add_number, jnp.asarray(x), ends, num_outputs=2)
    jax.effects_barrier()
    expert = np.repeat(np.arange(3), sizes)
    np.testing.assert_allclose(y[: len(expert)], x[: len(expert)] + expert[:, None] + 1, rtol=1e-6)
    assert not np.asarray(y)[len(expert) :].any()
    # Blocks of 16 rows: so many as the groups fill, and none of an expert without rows.
    assert sorted(seen) == [i for i, size in enumerate(sizes) for _ in range(-(-size // 16))]


def test_experts_in_int8_are_computed_as_their_widened_weights(native):
    """By XLA and by the native kernels."""
    layer = make_layer(SOFTMAX, "bfloat16")
    widened = make_layer(SOFTMAX, "bfloat16")
    packed = make_layer(SOFTMAX, "bfloat16")
    for name in ("gate_proj", "up_proj", "down_proj"):
        plain = getattr(layer.experts, name).weight[...]
        weight = store(getattr(layer.experts, name).weight, Int8Form(), 2)
        getattr(layer.experts, name).weight = weight
        values = np.asarray(weight.values[...])
        wide = values * np.asarray(weight.scales[...])[..., None]
        assert np.abs(wide - np.asarray(plain, np.float32)).max() < 0.02
        getattr(widened.experts, name).weight.set_value(jnp.asarray(wide))
        words = store(getattr(packed.experts, name).weight, Int8Form(), 2)
        words.values.set_value(jnp.asarray(pack_experts(values)))
        getattr(packed.experts, name).weight = words
    x = np.asarray(np.random.default_rng(1).standard_normal((20, HIDDEN)), jnp.bfloat16)
    expected = reference(widened, SOFTMAX, x)
    for stored in (layer, packed):
        errors = np.abs(run(stored, x, 20).astype(np.float64) - expected)
        assert np.median(errors) < 0.02
        assert errors.mean() < 0.1


def choice_of_row(
    logits: np.ndarray, bias: np.ndarray | None, config: ExpertsConfig, routing: GroupRouting
) -> dict[int, float]:
    """The experts of one row with their scales, in plain Python and float64."""
    weights = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if routing.is_sigmoid else weights / weights.sum()
    ranks = scores if bias is None else scores + bias
    size = len(ranks) // routing.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(routing.num_groups)]

    def worth(group: list[int]) -> float:
        return sum(sorted((ranks[e] for e in group), reverse=True)[: 1 if bias is None else 2])

    allowed = sorted(groups, key=worth, reverse=True)[: routing.num_chosen_groups]
    best = sorted((e for group in allowed for e in group), key=lambda e: -ranks[e])
    best = best[: config.num_experts_per_token]
    divisor = sum(scores[e] for e in best) if config.normalize else 1.0
    return {e: scores[e] / divisor * routing.scale for e in best}


@pytest.mark.parametrize(
    "routing",
    [
        GroupRouting(scale=1.5),
        GroupRouting(num_groups=4, num_chosen_groups=2, scale=16.0),
        GroupRouting(is_sigmoid=True, has_bias=True, scale=2.5),
        GroupRouting(True, num_groups=4, num_chosen_groups=2, has_bias=True, scale=2.5),
        GroupRouting(True, num_groups=12, num_chosen_groups=5, has_bias=True),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_experts_are_chosen_within_the_best_groups(routing: GroupRouting, normalize: bool):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (50, 12)).astype(np.float32)
    # So that it decides, and below zero: a masked score of zero would win.
    bias = rng.normal(-1, 0.5, 12).astype(np.float32) if routing.has_bias else None
    config = ExpertsConfig(12, 4, 8, normalize=normalize, routing=routing)
    chosen, scales = jax.jit(lambda x, b: choose_in_groups(x, b, config, routing))(logits, bias)
    for row in range(50):
        expected = choice_of_row(logits[row].astype(np.float64), bias, config, routing)
        assert chosen[row].tolist() == list(expected)
        np.testing.assert_allclose(scales[row], list(expected.values()), rtol=1e-5)
