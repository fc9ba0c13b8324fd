"""`ModelSize`: how many parameters a model has, by what a step does with them."""

from dataclasses import dataclass

from paged.models.config import ModelConfig
from paged.models.latent_config import LatentConfig
from paged.models.moe_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of a model by what a step does with them.

    Attributes:
      layer_matmul: of the projections of all layers that one token passes through: of a mixture,
        the router and the chosen experts.
      head: of the projection to the vocabulary; each sampled row meets them.
      total: all, embedding, norms and biases included; tied embeddings once.
      experts: of the projections of all experts, chosen or not; 0 in a dense model.
      unused: of `total`, those of experts that one token does not pass through.
    """

    layer_matmul: int
    head: int
    total: int
    experts: int = 0
    unused: int = 0

    @property
    def active(self) -> int:
        """Parameters that one token meets, embedding and head included, as papers count them."""
        return self.total - self.unused


def model_size(model: ModelConfig) -> ModelSize:
    """Return the number of parameters of a decoder; quantised weights count as what they encode."""
    hidden, mlp = model.hidden_size, model.intermediate_size
    if model.latent is None:
        attention, small = _attention_size(model)
    else:
        attention, small = _latent_attention_size(model, model.latent)
    small += (4 if model.norms == "around" else 2) * hidden
    small += hidden * model.attention_output_bias
    num_sparse = num_sparse_layers(model)
    num_dense = model.num_layers - num_sparse
    matmul = model.num_layers * attention + num_dense * 3 * hidden * mlp
    total = matmul + model.num_layers * small
    total += num_dense * (2 * mlp + hidden) * model.mlp_bias
    experts = unused = 0
    if model.experts is not None:
        router = model.experts.num_experts * hidden
        shared = 3 * hidden * model.experts.shared_size
        routing = model.experts.routing
        router_biases = model.experts.router_bias + (routing is not None and routing.has_bias)
        expert, expert_biases = _expert_size(hidden, model.experts)
        num_chosen, num_all = model.experts.num_experts_per_token, model.experts.num_experts
        matmul += num_sparse * (router + shared + num_chosen * expert)
        experts = num_sparse * num_all * expert
        unused = num_sparse * (num_all - num_chosen) * (expert + expert_biases)
        total += num_sparse * (router + shared + num_all * (expert_biases + router_biases))
        total += experts
    embedding = model.vocab_size * hidden
    total += hidden + (embedding if model.tie_word_embeddings else 2 * embedding)
    return ModelSize(matmul, embedding, total, experts, unused)


def _attention_size(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters of a layer's projections, and those of its biases and norms."""
    q_dim = model.num_q_heads * model.head_dim
    kv_dim = model.num_kv_heads * model.head_dim
    small = {"none": 0, "head": 2 * model.head_dim, "all": q_dim + kv_dim}[model.qk_norm]
    small += (q_dim + 2 * kv_dim) * model.attention_bias
    small += model.num_q_heads * model.attention_sinks
    return model.hidden_size * (q_dim + 2 * kv_dim) + q_dim * model.hidden_size, small


def _latent_attention_size(model: ModelConfig, latent: LatentConfig) -> tuple[int, int]:
    """Return the same of latent attention."""
    hidden, q_rank = model.hidden_size, latent.q_rank or 0
    q_dim, v_dim = model.num_q_heads * latent.qk_dim, model.num_q_heads * latent.value_dim
    queries = q_rank * (hidden + q_dim) if q_rank else hidden * q_dim
    up = latent.kv_rank * model.num_q_heads * (latent.nope_dim + latent.value_dim)
    small = latent.kv_rank + q_rank + (latent.head_dim + q_rank) * model.attention_bias
    return queries + hidden * latent.head_dim + up + v_dim * hidden, small


def num_sparse_layers(model: ModelConfig) -> int:
    """Return how many layers have a mixture of experts."""
    return 0 if model.experts is None else model.num_layers - len(model.experts.dense_layers)


def _expert_size(hidden: int, experts: ExpertsConfig) -> tuple[int, int]:
    """Return the parameters of one expert's projections, and its biases."""
    mlp = experts.intermediate_size
    return 3 * hidden * mlp, (2 * mlp + hidden) * experts.expert_bias
