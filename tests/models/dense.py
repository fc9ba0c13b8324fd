"""A decoder written in numpy: dense, float64, without a cache; and parameters that exercise it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model


def random_params(config: ModelConfig) -> nnx.State[Any, Any]:
    """float32 parameters of which no bias is zero and no norm is one."""
    rng = np.random.default_rng(1)
    _, abstract = abstract_model(config, dtype="float32")
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.25, leaf.shape), jnp.float32), abstract
    )


def dense_logits(config: ModelConfig, params: nnx.State[Any, Any], ids: list[int]) -> np.ndarray:
    """Logits of every position, `[len(ids), vocab]`, in float64 and without a cache."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))
    length, half = len(ids), config.head_dim // 2
    age = np.subtract.outer(np.arange(length), np.arange(length))  # of a key, seen from a query
    turns = np.exp(
        1j * np.outer(np.arange(length), config.rope.theta ** -(np.arange(half) / half))
    )[:, None]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def linear(layer: dict, equation: str, x: np.ndarray) -> np.ndarray:
        return np.einsum(equation, x, layer["weight"]) + layer.get("bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[..., :half] + 1j * x[..., half:]) * turns
        return np.concatenate([turned.real, turned.imag], -1)

    x = p["embed"]["weight"][ids]
    for layer, window in zip(p["layers"].values(), config.layer_windows, strict=True):
        attention, mlp = layer["attention"], layer["mlp"]
        normed = norm(x, layer["attention_norm"]["weight"])
        q = rotate(linear(attention["q_proj"], "td,nhd->tnh", normed))
        k = rotate(linear(attention["k_proj"], "td,nhd->tnh", normed))
        v = linear(attention["v_proj"], "td,nhd->tnh", normed)
        k, v = (np.repeat(y, config.num_q_heads // config.num_kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(config.head_dim)
        is_visible = (age >= 0) & (age < (window or length))
        weights = np.exp(np.where(is_visible, scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("nts,snh->tnh", weights, v)
        x = x + linear(attention["o_proj"], "tnh,dnh->td", mixed)
        normed = norm(x, layer["mlp_norm"]["weight"])
        gate = linear(mlp["gate_proj"], "td,fd->tf", normed)
        up = linear(mlp["up_proj"], "td,fd->tf", normed)
        x = x + linear(mlp["down_proj"], "tf,df->td", gate / (1 + np.exp(-gate)) * up)
    head = p["embed"] if config.tie_word_embeddings else p["lm_head"]
    return norm(x, p["norm"]["weight"]) @ head["weight"].T
