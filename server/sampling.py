"""From a request's sampling fields to the engine's `SamplingParams`."""

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paged.scheduler.params import ParameterError, SamplingParams
from paged.server.protocol import GenerationRequest
from paged.server.structured import structured_outputs

if TYPE_CHECKING:
    from paged.scheduler.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

_FIELDS_WITH_MODEL_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sampling_defaults(engine: "AsyncEngine") -> dict[str, Any]:
    """Return the sampling parameters that the checkpoint recommends, `max_tokens` among them.

    Empty if the engine was told to ignore them (generation_config="vllm").

    Raises: ValueError if the checkpoint recommends what cannot be served.
    """
    if engine.config.generation_config == "vllm":
        return {}
    defaults = engine.checkpoint.sampling_defaults
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        raise ValueError(
            f"The model's generation_config.json cannot be served: {error} Ignore it with "
            "--generation-config vllm."
        ) from None
    if defaults:
        logger.info(
            "Requests take these defaults from the model's generation_config.json: %s. Ignore it "
            "with --generation-config vllm.",
            defaults,
        )
    return defaults


def resolve_max_tokens(requested: int | None, *, num_prompt_tokens: int, max_model_len: int) -> int:
    """Return how many tokens a request may generate: what it asks for, cut to what fits.

    Raises: ParameterError if it asks for more than the whole context.
    """
    room = max_model_len - num_prompt_tokens
    if requested is None:
        return room
    if requested > max_model_len:
        raise ParameterError(
            "max_tokens", requested, f"must not exceed max_model_len={max_model_len}"
        )
    return min(requested, room)


def sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """Return the engine's parameters: the request's, else the model's, else neutral ones.

    Raises: ParameterError naming the field that is out of range.
    """
    chosen = {name: defaults[name] for name in _FIELDS_WITH_MODEL_DEFAULTS if name in defaults}
    for name in _FIELDS_WITH_MODEL_DEFAULTS:
        value = getattr(request, name)
        if value is not None:
            chosen[name] = value
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", request.allowed_token_ids, vocab_size)
    return SamplingParams(
        **chosen,
        n=1 if request.n is None else request.n,
        seed=None if request.seed == -1 else request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words,
        skip_special_tokens=request.skip_special_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
        structured_outputs=structured_outputs(request),
    )


def check_token_ids(name: str, ids: Collection[int] | None, vocab_size: int) -> None:
    """Raise ParameterError for an id outside the vocabulary."""
    if not ids:
        return
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise ParameterError(name, token_id, f"must hold token ids in [0, {vocab_size - 1}]")


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if bias is None:
        return None
    for key in bias:
        # Not int(): it would take "1_0", " 5" and digits of other scripts, too.
        if not (key.isascii() and key.isdecimal()):
            raise ParameterError("logit_bias", key, "must map token ids to numbers")
    ids = {int(key): value for key, value in bias.items()}
    check_token_ids("logit_bias", ids, vocab_size)
    return ids
