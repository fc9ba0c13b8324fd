"""`load`: a model for programs of one's own, as structure, parameters and config."""

from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from paged.models.checkpoint import open_checkpoint
from paged.models.config import ModelConfig
from paged.models.forward import GraphDef, abstract_model
from paged.models.quantization import resolve_quantization
from paged.models.weights import resolve_dtype


class LoadedModel(NamedTuple):
    """A model that was split into structure and parameters.

    Attributes:
      graphdef: the structure; static, to be closed over by functions that are jitted.
      params: a pytree of arrays, `nnx.State`; what `jax.grad` differentiates by.
      config: the shape of the model.
    """

    graphdef: GraphDef
    params: nnx.State[Any, Any]
    config: ModelConfig


def load(
    model: str | Path | None = None,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    shardings: Any = None,
    progress: bool = True,
) -> LoadedModel:
    """Load a model for use without an engine.

        graphdef, params, config = paged.models.load("path/to/model", dtype="float32")
        loss = lambda params, ids: -paged.models.token_logprobs(graphdef, params, ids).mean()
        gradient = jax.jit(jax.grad(loss))(params, token_ids)

    Args:
      model: a directory, a GGUF file or a Hub id, see `open_checkpoint`; None is the demo model.
      dtype: element type of parameters and activations, see `resolve_dtype`.
      quantization: see `resolve_quantization`; such weights have no gradient.
      max_model_len: longest sequence, tokens; None: what the model was made for. Counts for
        "longrope" only (Phi-3), whose angles depend on it: give it what the engine has.
      shardings: where parameters lie, see `paged.models.forward.param_shardings`; None: on the
        first device.
      progress: show a bar on standard error.

    Raises:
      CheckpointError, UnsupportedModelError: see `open_checkpoint`.
      ValueError: if a setting is unknown or contradicts the checkpoint.
    """
    checkpoint = open_checkpoint(None if model is None else str(model))
    config = checkpoint.model_config
    config = config.for_context(max_model_len or config.max_position_embeddings)
    settings: dict[str, Any] = {
        "dtype": resolve_dtype(dtype, config),
        "quantization": resolve_quantization(quantization, config.quantization_method),
    }
    params = checkpoint.load_params(config, **settings, shardings=shardings, progress=progress)
    return LoadedModel(abstract_model(config, **settings)[0], params, config)
