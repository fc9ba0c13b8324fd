"""The dense forward pass gives the reference's logits, and gradients that are right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.dense_attention import dense_attention
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, dense_forward, dense_logits, token_logprobs
from paged.models.weights import SafetensorsSource, load_params
from tests.models.dense import dense_logits as reference_logits
from tests.models.dense import random_params
from tests.models.test_decoder import CONFIG
from tests.models.test_golden_tiny import EXPERT_MODELS, LATENT_MODELS, MODELS


def load_tiny(data_dir: Path, name: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return graphdef and float32 parameters of a golden model, and its cases."""
    folder = data_dir / "golden" / "tiny" / name
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    params = load_params(config, SafetensorsSource(folder), dtype="float32", progress=False)
    graphdef, _ = abstract_model(config, dtype="float32")
    return graphdef, params, json.loads((folder / "expected.json").read_text())["cases"]


def padded(rows: list[list[int]]) -> jax.Array:
    """Return rows of one length, zeros at the end."""
    length = max(map(len, rows))
    return jnp.asarray([row + [0] * (length - len(row)) for row in rows], jnp.int32)


# The others are combinations of what these have.
QUICK = {*MODELS, *EXPERT_MODELS} - {*LATENT_MODELS} | {"deepseek_v3"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in (*MODELS, *EXPERT_MODELS)
    ],
)
def test_logits_equal_the_reference(data_dir: Path, name: str) -> None:
    graphdef, params, cases = load_tiny(data_dir, name)
    ids = padded([case["prompt_ids"] for case in cases])
    logits = np.asarray(jax.jit(lambda p, i: dense_logits(graphdef, p, i))(params, ids))
    for row, case in enumerate(cases):
        expected = np.asarray(case["logits"])
        np.testing.assert_allclose(logits[row, : len(expected)], expected, atol=1e-4, rtol=1e-5)


def test_log_probabilities_are_those_of_the_reference_logits(data_dir: Path) -> None:
    graphdef, params, cases = load_tiny(data_dir, "llama")
    ids = padded([case["prompt_ids"] for case in cases])
    found = np.asarray(token_logprobs(graphdef, params, ids))
    for row, case in enumerate(cases):
        logits = np.asarray(case["logits"], np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [logprobs[i, token] for i, token in enumerate(case["prompt_ids"][1:])]
        np.testing.assert_allclose(found[row, : len(expected)], expected, atol=1e-4)


def test_gradient_is_the_slope_of_an_independent_implementation() -> None:
    config = replace(CONFIG, layer_windows=(3, None, 5))
    graphdef, _ = abstract_model(config, dtype="float32")
    params, ids = random_params(config), [5, 9, 2, 9, 33, 1, 0, 7]
    rng = np.random.default_rng(0)

    def reference_loss(params: Any) -> float:
        logits = reference_logits(config, params, ids)[:-1]
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum(-1, keepdims=True))
        return float((logprobs - logits.max())[np.arange(len(ids) - 1), ids[1:]].mean())

    def loss(params: Any) -> jax.Array:
        return token_logprobs(graphdef, params, jnp.asarray([ids], jnp.int32)).mean()

    gradient = jax.jit(jax.grad(loss))(params)
    for _ in range(3):  # directions in which every parameter moves
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
        moved = [
            jax.tree.map(lambda p, d, e=e: np.asarray(p, np.float64) + e * d, params, direction)
            for e in (1e-5, -1e-5)
        ]
        slope = (reference_loss(moved[0]) - reference_loss(moved[1])) / 2e-5
        products = jax.tree.map(lambda g, d: float((np.asarray(g) * d).sum()), gradient, direction)
        assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=2e-3)


# Soft caps and norms around; sinks, and experts with biases; latent vectors.
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("gemma2", False),
        ("gpt_oss", True),
        pytest.param("deepseek_v2", False, marks=pytest.mark.slow),
    ],
)
def test_gradient_is_the_slope_of_the_loss(data_dir: Path, name: str, remat: bool) -> None:
    graphdef, params, cases = load_tiny(data_dir, name)
    ids = padded([case["prompt_ids"] for case in cases])

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return token_logprobs(graphdef, params, ids, remat=remat).mean()

    gradient = jax.jit(jax.grad(loss))(params)
    norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient))))
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))
    # Along the gradient, so that the difference stands out from float32's rounding.
    step = 2e-3 / norm
    ahead, behind = (
        float(loss(jax.tree.map(lambda p, g, s=s: p + s * g, params, gradient)))
        for s in (step, -step)
    )
    assert (ahead - behind) / (2 * step) == pytest.approx(norm**2, rel=0.02)


def test_recomputation_saves_memory_and_changes_nothing(data_dir: Path) -> None:
    graphdef, params, cases = load_tiny(data_dir, "llama")
    ids = jnp.tile(padded([cases[0]["prompt_ids"]]), (16, 8))

    def gradient(remat: bool) -> Any:
        loss = lambda p: token_logprobs(graphdef, p, ids, remat=remat).mean()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(params).compile()

    kept, recomputed = gradient(False), gradient(True)
    bytes_kept, bytes_recomputed = (
        program.memory_analysis().temp_size_in_bytes for program in (kept, recomputed)
    )
    assert bytes_recomputed < 0.8 * bytes_kept
    for a, b in zip(
        jax.tree.leaves(kept(params)), jax.tree.leaves(recomputed(params)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_arrays_of_other_shapes_are_refused(data_dir: Path) -> None:
    graphdef, params, _ = load_tiny(data_dir, "llama")
    with pytest.raises(ValueError, match=r"\[num_seqs, length\]"):
        dense_forward(graphdef, params, jnp.zeros(4, jnp.int32))

    q, k = jnp.zeros((1, 4, 4, 8)), jnp.zeros((1, 4, 3, 8))
    with pytest.raises(ValueError, match="of which q has a multiple"):
        dense_attention(q, k, k)
