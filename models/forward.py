"""The model as pure functions of its parameters: `forward`, its head, and its structure."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from paged.cache_groups import CacheGroup
from paged.kv_cache import KVCache
from paged.kv_write import write_token_ids
from paged.models.batch import ForwardBatch
from paged.models.config import ModelConfig
from paged.models.decoder import DecoderLM
from paged.models.layers import Embed, Linear, RMSNorm
from paged.models.lora import LayerAdapters, LoRAStack, own_rows
from paged.models.moe import ExpertLinear, Experts
from paged.models.quantization import quantize_layers
from paged.models.registry import ARCHITECTURES
from paged.sharding import ShardingRules

type GraphDef = nnx.GraphDef[DecoderLM]


def forward(
    graphdef: GraphDef,
    params: nnx.State[Any, Any],
    kv_cache: KVCache,
    batch: ForwardBatch,
    loras: LoRAStack | None = None,
) -> tuple[Float[Array, "num_tokens hidden_size"], KVCache]:
    """Run the decoder over a flat batch of mixed prefill and decode tokens.

    Args:
      graphdef, params: the split model, see `abstract_model` and `load_params`.
      kv_cache: holds the tokens before this step; donate it to have it updated in place.
      batch: the tokens of this step, and where their keys and values go.
      loras: the adapters that `batch.lora_ids` are slots of; None: none.

    Returns:
      Hidden states after the final norm, `[num_tokens, hidden_size]` (rows of padding hold
      garbage), and the cache with this step's keys, values and token ids.
    """
    model = nnx.merge(graphdef, params)
    if loras is not None:
        attach_adapters(model, loras, batch)
    slots = batch.attention[0].slot_mapping
    token_ids = write_token_ids(kv_cache.token_ids, batch.token_ids, slots)
    hidden, layers = model(batch, kv_cache.layers)
    return hidden, KVCache(layers, token_ids)


def compute_logits(
    graphdef: GraphDef, params: nnx.State[Any, Any], hidden: Float[Array, "n hidden_size"]
) -> Float[Array, "n vocab_size"]:
    """Return float32 logits `[n, vocab_size]` of rows of `forward`'s hidden states."""
    return nnx.merge(graphdef, params).logits(hidden)


def dense_forward(
    graphdef: GraphDef,
    params: nnx.State[Any, Any],
    token_ids: Int[Array, "..."],
    *,
    remat: bool = False,
) -> Float[Array, "num_seqs length hidden_size"]:
    """Run the decoder over whole sequences, without a cache; it has a gradient.

    For use inside of `jax.jit` and `jax.grad`. Attention is causal, so what pads a sequence at its
    end changes nothing before it. Scores of attention take memory that grows with length squared.

    Args:
      graphdef, params: the split model, see `paged.models.load`. Weights in fewer bits are
        constants: there is a gradient for plain ones only, and none for weights that are packed for
        a CPU.
      token_ids: int32 `[num_seqs, length]`.
      remat: keep only each layer's input for the gradient, and compute the rest again: less memory
        for about a third more time.

    Returns:
      Hidden states after the final norm, `[num_seqs, length, hidden_size]`.

    Raises:
      ValueError: if `token_ids` has not two axes.
    """
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids has shape {token_ids.shape}; it must be [num_seqs, length].")
    model = nnx.merge(graphdef, params)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            module.backend = "xla"
    return model.dense(token_ids, remat=remat)


def dense_logits(
    graphdef: GraphDef,
    params: nnx.State[Any, Any],
    token_ids: Int[Array, "num_seqs length"],
    *,
    remat: bool = False,
) -> Float[Array, "num_seqs length vocab_size"]:
    """Return float32 logits `[num_seqs, length, vocab_size]`; see `dense_forward`."""
    hidden = dense_forward(graphdef, params, token_ids, remat=remat)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return compute_logits(graphdef, params, rows).reshape(*token_ids.shape, -1)


def token_logprobs(
    graphdef: GraphDef,
    params: nnx.State[Any, Any],
    token_ids: Int[Array, "num_seqs length"],
    *,
    remat: bool = False,
) -> Float[Array, "num_seqs length_minus_1"]:
    """Return the log probability of each token but the first, given those before it.

    Sequence by sequence, and again for the gradient: the logits of one are in memory at a time.

    Args:
      graphdef, params, token_ids, remat: see `dense_forward`.

    Returns:
      float32 `[num_seqs, length - 1]`; column i is of `token_ids[:, i + 1]`, at temperature 1.
    """
    hidden = dense_forward(graphdef, params, token_ids, remat=remat)
    head, head_params = split_head(graphdef, params)

    @jax.checkpoint
    def of_sequence(head_params: Any, hidden: Array, next_ids: Array) -> Array:
        logprobs = jax.nn.log_softmax(nnx.merge(head, head_params).logits(hidden), axis=-1)
        return jnp.take_along_axis(logprobs, next_ids[:, None], axis=1)[:, 0]

    logprobs: Array = jax.lax.map(
        lambda sequence: of_sequence(head_params, *sequence), (hidden[:, :-1], token_ids[:, 1:])
    )
    return logprobs


type HeadDef = nnx.GraphDef[Embed]


def split_head(graphdef: GraphDef, params: nnx.State[Any, Any]) -> tuple[HeadDef, Any]:
    """Return structure and parameters of the head alone; they share the model's arrays.

    A program that needs nothing else takes these few arrays instead of hundreds.
    """
    head, head_params = nnx.split(nnx.merge(graphdef, params).head)
    return head, head_params


def abstract_model(
    config: ModelConfig,
    *,
    dtype: str,
    attention_backend: str = "auto",
    cache_groups: tuple[CacheGroup, ...] | None = None,
    quantization: str | None = None,
    split_by: ShardingRules | None = None,
) -> tuple[GraphDef, nnx.State[Any, Any]]:
    """Return the structure of a model and the shapes of its parameters; no memory is used.

    Args:
      config: shape of the model.
      dtype: element type of parameters and activations, see `resolve_dtype`.
      attention_backend: name that the cache ops are called with.
      cache_groups: which layers share block tables; None: all of them.
      quantization: how weights are quantised that the checkpoint has in full, see
        `paged.models.quantization`.
      split_by: the model is one device's part (`TensorParallel.part`), for use under a `shard_map`;
        see `split_layers`. None: it is all there is.

    Returns:
      The graph definition, and a state of `jax.ShapeDtypeStruct` whose variables carry the logical
      names of their axes in the metadata `out_sharding`.
    """
    build = ARCHITECTURES[config.architecture].build

    def create() -> DecoderLM:
        model = build(
            config,
            dtype=dtype,
            attention_backend=attention_backend,
            cache_groups=cache_groups,
            rngs=nnx.Rngs(0),
        )
        if split_by is not None:
            split_layers(model, split_by)
        quantize_layers(model, quantization)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(create))
    return graphdef, state


def model_in_full(config: ModelConfig, *, dtype: str) -> DecoderLM:
    """Return a model of abstract weights, none of which is in fewer bits yet.

    Args:
      config: shape of the model; its quantization is what may be made of the weights.
      dtype: element type of the parameters.
    """
    model = nnx.merge(*abstract_model(dataclasses.replace(config, quantization=None), dtype=dtype))
    model.config = config
    return model


def linear_layers(model: DecoderLM) -> list[Linear | ExpertLinear | Embed]:
    """Return the layers that multiply by a weight: the linear ones, and the head."""
    layers: list[Linear | ExpertLinear | Embed] = [
        module for _, module in nnx.iter_modules(model) if isinstance(module, Linear | ExpertLinear)
    ]
    return [*layers, model.head]


def attach_adapters(model: DecoderLM, loras: LoRAStack, batch: ForwardBatch) -> None:
    """Have the linear layers add what the adapters of a batch's tokens make of their inputs.

    Args:
      model: changed in place, for this batch.
      loras: of the model, or of the part of it that one device computes.
      batch: has `lora_ids`.
    """
    assert batch.lora_ids is not None
    is_own = own_rows(loras, batch.lora_ids)
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            pair = loras.layers.get(".".join(map(str, path)))
            if pair is not None:
                module.adapters = nnx.data(LayerAdapters(pair, is_own))


def split_layers(model: DecoderLM, rules: ShardingRules) -> None:
    """Tell the layers of one device's part where they meet the others.

    A linear layer whose inputs are split sums its products, and so does the embedding; the head
    gathers. For a decoder layer these are the two sums of Megatron-LM. A norm over all heads takes
    the mean of the devices' means, which are over as many features. A mixture of experts sums once,
    whether each device has some of the experts or some features of all.

    Args:
      model: changed in place.
      rules: logical axis -> mesh axis.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.sum_axis = next(filter(None, rules.partition_spec(module.input_axes)), None)
        elif isinstance(module, Embed):
            module.vocab_axis = rules.vocab
        elif isinstance(module, RMSNorm):
            axes = module.weight.get_metadata("out_sharding")
            module.mean_axis = next(filter(None, rules.partition_spec(axes)), None)
        elif isinstance(module, Experts):
            down = module.down_proj
            module.expert_axis, _, down.sum_axis = rules.partition_spec(down.axes)
            module.sum_axis = module.expert_axis or down.sum_axis


def param_shardings(
    abstract_state: nnx.State[Any, Any], rules: ShardingRules, mesh: Mesh
) -> nnx.State[Any, Any]:
    """Return where each parameter lives on `mesh`: its logical axes, looked up in `rules`.

    Args:
      abstract_state: the parameters of `abstract_model`.
      rules: logical axis -> mesh axis.
      mesh: the devices.

    Returns:
      A state like `abstract_state` with a `NamedSharding` for each parameter.

    Raises:
      ValueError: if a split axis is no multiple of its mesh axis; the message names the parameter.
    """
    placed = []
    for path, variable in nnx.to_flat_state(abstract_state):
        sharding = rules.named_sharding(mesh, variable.get_metadata("out_sharding"))
        for axis, (size, mesh_axis) in enumerate(zip(variable.shape, sharding.spec, strict=True)):
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                raise ValueError(
                    f"axis {variable.get_metadata('out_sharding')[axis]!r} of parameter "
                    f"{'.'.join(map(str, path))} has size {size}, no multiple of the "
                    f"{mesh.shape[mesh_axis]} devices of mesh axis {mesh_axis!r}; use fewer "
                    "devices or map the axis to None."
                )
        placed.append((path, variable.replace(sharding)))
    shardings: nnx.State[Any, Any] = nnx.from_flat_state(placed)
    return shardings


def init_random_params(
    config: ModelConfig, *, dtype: str, seed: int = 0, shardings: Any = None
) -> nnx.State[Any, Any]:
    """Return random parameters, for tests and for timing without a checkpoint.

    They are made on the default device, then moved; the model must fit there.

    Args:
      config: shape of the model.
      dtype: element type of the parameters.
      seed: the same seed gives the same parameters.
      shardings: tree of shardings like the parameters', see `param_shardings`; None leaves them.
    """
    build = ARCHITECTURES[config.architecture].build
    model = build(config, dtype=dtype, attention_backend="auto", rngs=nnx.Rngs(seed))
    params = nnx.state(model)
    return params if shardings is None else jax.device_put(params, shardings)
