"""`choose_in_groups`: experts by DeepSeek's routing, from the router's logits."""

import jax
import jax.numpy as jnp
from jax import Array

from paged.models.moe_config import ExpertsConfig, GroupRouting

# Added to a sum of scores that is divided by, as in the published code.
_LEAST_SUM = 1e-20


def choose_in_groups(
    logits: Array, bias: Array | None, config: ExpertsConfig, routing: GroupRouting
) -> tuple[Array, Array]:
    """Return the experts of each row, the best first, and what their outputs are scaled by.

    Args:
      logits: float32 `[num_tokens, num_experts]`.
      bias: float32 `[num_experts]` of the choice, if `routing` has one.
      config: says how many experts are chosen, and whether their scores are divided by their sum.
      routing: the groups.

    Returns: int32 and float32 `[num_tokens, num_experts_per_token]`.

    Source: see `GroupRouting`; transformers for what the papers leave open.
    """
    scores = jax.nn.sigmoid(logits) if routing.is_sigmoid else jax.nn.softmax(logits, axis=-1)
    ranks = scores if bias is None else scores + bias[None]
    if routing.num_groups > 1:
        ranks = _without_other_groups(ranks, routing)
    _, chosen = jax.lax.top_k(ranks, config.num_experts_per_token)
    scales = jnp.take_along_axis(scores, chosen, axis=1)
    if config.normalize:
        scales = scales / (scales.sum(axis=-1, keepdims=True) + _LEAST_SUM)
    return chosen, scales * routing.scale


def _without_other_groups(ranks: Array, routing: GroupRouting) -> Array:
    """Return the ranks, minus infinity where an expert's group is not chosen."""
    by_group = ranks.reshape(len(ranks), routing.num_groups, -1)
    counted = min(2 if routing.has_bias else 1, by_group.shape[-1])
    group_ranks = jax.lax.top_k(by_group, counted)[0].sum(axis=-1)
    _, groups = jax.lax.top_k(group_ranks, routing.num_chosen_groups)
    is_chosen = (groups[:, :, None] == jnp.arange(routing.num_groups)[None, None]).any(axis=1)
    return jnp.where(is_chosen[..., None], by_group, -jnp.inf).reshape(ranks.shape)
