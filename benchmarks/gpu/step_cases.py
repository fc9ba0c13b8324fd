"""Whole steps of models with random weights: forward pass, head and likeliest tokens."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.programs import Input, Program
from paged.kv_cache import KVCache
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, split_head
from paged.models.packing import BatchLayout
from paged.models.step import forward_step, greedy_step, step_leaves
from paged.scheduler.simulator.model_presets import MODELS

_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A step of equal sequences.

    Attributes:
      model: its shape.
      num_seqs, context, query: sequences, tokens of each with this step's, tokens of this step.
      unit, first, goal: as in `Program`.
      dtype: of weights, activations and cache.
    """

    model: ModelConfig
    num_seqs: int
    context: int
    query: int
    unit: str
    first: float
    goal: float
    dtype: str = "bfloat16"


def _decode(model: ModelConfig, num_seqs: int, slack: tuple[float, float]) -> Step:
    first, goal = (100 / (1 + share) for share in slack)
    return Step(model, num_seqs, 2048, 1, "% of floor", first, goal)


def _steps(label: str, preset: str) -> dict[str, Step]:
    model = MODELS[preset]
    return {
        f"{label} decode 64": _decode(model, 64, (0.15, 0.07)),
        f"{label} decode 1": _decode(model, 1, (0.25, 0.15)),
        f"{label} prefill 8k": Step(model, 1, 8192, 8192, "% of product", 50, 60),
    }


STEPS: Mapping[str, Step] = {
    **_steps("Llama-3-8B", "llama-3.1-8b"),
    **_steps("Qwen2.5-7B", "qwen2.5-7b"),
    **_steps("Qwen2.5-1.5B", "qwen2.5-1.5b"),
}

_TINY = ModelConfig(
    "LlamaForCausalLM", 256, 64, 128, 2, 4, 2, 16, max_position_embeddings=64, rms_norm_eps=1e-5
)  # fmt: skip
TINY_STEPS: Mapping[str, Step] = {
    "tiny decode 2": Step(_TINY, 2, 40, 1, "% of floor", 87, 93, "float32"),
    "tiny prefill 32": Step(_TINY, 1, 32, 32, "% of product", 50, 60, "float32"),
}


def step_program(folder: pathlib.Path, name: str, step: Step) -> Program:
    """Return the record of a step; writes its packed inputs to a folder."""
    model, layout = step.model, _layout(step)
    leaves = jax.tree.leaves(abstract_model(model, dtype=step.dtype)[1])
    file = f"{name.replace(' ', '_')}.packed.npy"
    np.save(folder / file, _packed(step, layout))
    num_blocks = 1 + step.num_seqs * layout.max_blocks_per_seq
    layer = (num_blocks, 2, model.num_kv_heads, _BLOCK_SIZE, model.head_dim)
    # Small random weights keep activations finite through all layers.
    weights = tuple(Input(leaf.shape, str(leaf.dtype), scale=0.02) for leaf in leaves)
    cache = (Input(layer, step.dtype),) * model.num_layers
    state = (
        *cache,
        Input((num_blocks, _BLOCK_SIZE), "int32", "zeros"),
        Input((step.num_seqs,), "int32", "zeros"),
    )
    return Program(
        name,
        "step",
        (*weights, *state, Input((layout.size,), "int32", file)),
        carry=tuple((i, len(weights) + i) for i in range(len(state))),
        read_bytes=_weight_bytes(step) + _kv_bytes(step),
        flops=_flops(step),
        unit=step.unit,
        first=step.first,
        goal=step.goal,
    )


def run_step(step: Step, attention_backend: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of the inputs of `step_program`: new cache, last tokens, tokens.

    The engine has two programs for it; in one they are the same operations.
    """
    layout = _layout(step)
    graphdef, params = abstract_model(
        step.model, dtype=step.dtype, attention_backend=attention_backend
    )
    leaves, treedef = step_leaves(params, None)
    head = split_head(graphdef, params)[0]
    forward = functools.partial(forward_step, treedef=treedef, graphdef=graphdef, layout=layout)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        weights, (*layers, token_ids, last_tokens, packed) = (
            arrays[: len(leaves)],
            arrays[len(leaves) :],
        )
        cache = KVCache(tuple(layers), token_ids)
        hidden, rows, cache, _ = forward(weights, cache, packed, last_tokens)
        head_params: Any = split_head(graphdef, jax.tree.unflatten(treedef, weights)[0])[1]
        tokens, last_tokens = greedy_step(
            head_params, hidden, rows, last_tokens, head=head, layout=layout
        )
        return (*cache.layers, cache.token_ids, last_tokens, tokens)

    return run


def _layout(step: Step) -> BatchLayout:
    width = -(-step.context // _BLOCK_SIZE)
    return BatchLayout(
        num_tokens=step.num_seqs * step.query,
        num_seqs=step.num_seqs,
        max_blocks_per_seq=width,
        max_logit_edits=8,
        vocab_size=step.model.vocab_size,
    )


def _packed(step: Step, layout: BatchLayout) -> np.ndarray:
    packed = layout.empty()
    views = layout.views(packed)
    rng = np.random.default_rng(0)
    width = layout.max_blocks_per_seq
    blocks = 1 + rng.permutation(step.num_seqs * width).reshape(step.num_seqs, width)
    positions = np.arange(step.context - step.query, step.context)
    slots = blocks[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    starts = np.arange(step.num_seqs + 1) * step.query
    views["seq_lens"][:] = step.context
    views["block_tables"][:] = blocks
    views["query_start_loc"][:] = starts
    views["logits_indices"][:] = starts[1:] - 1
    views["token_ids"][:] = rng.integers(step.model.vocab_size, size=layout.num_tokens)
    views["positions"][:] = np.tile(positions, step.num_seqs)
    views["slot_mapping"][:] = slots.reshape(-1)
    views["sampled_rows"][:] = np.arange(step.num_seqs)
    return packed


def _num_weights(step: Step) -> tuple[int, int]:
    """Return the numbers in all parameters, and in an embedding that is only looked up."""
    params = jax.tree.leaves(abstract_model(step.model, dtype=step.dtype)[1])
    total = sum(math.prod(leaf.shape) for leaf in params)
    is_tied = step.model.tie_word_embeddings
    return total, 0 if is_tied else step.model.vocab_size * step.model.hidden_size


def _weight_bytes(step: Step) -> int:
    total, looked_up = _num_weights(step)
    return (total - looked_up) * jnp.dtype(step.dtype).itemsize


def _kv_bytes(step: Step) -> int:
    model = step.model
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return step.num_seqs * step.context * per_token * jnp.dtype(step.dtype).itemsize


def _flops(step: Step) -> int:
    model = step.model
    total, looked_up = _num_weights(step)
    head = model.vocab_size * model.hidden_size
    tokens = step.num_seqs * step.query
    products = 2 * tokens * (total - looked_up - head) + 2 * step.num_seqs * head
    seen = step.query * (2 * step.context - step.query + 1) // 2
    attention = 4 * step.num_seqs * seen * model.num_layers * model.num_q_heads * model.head_dim
    return products + attention
