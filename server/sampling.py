"""From a request's sampling fields to the engine's `SamplingParams`."""

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.repetition import RepetitionDetection
from paged.server.errors import ApiError
from paged.server.protocol import GenerationRequest, RepetitionDetectionFields
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


def sampling_defaults(
    engine: "AsyncEngine", overrides: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the sampling parameters of requests that leave them out, `max_tokens` among them.

    They are what the checkpoint recommends, unless the engine was told to ignore that
    (generation_config="vllm"), and what the server's settings say on top.

    Args:
      engine: has the checkpoint.
      overrides: by the names of generation_config.json.

    Raises: ValueError if one of them recommends what cannot be served.
    """
    defaults: dict[str, Any] = {}
    if engine.config.generation_config != "vllm":
        defaults = _checked_defaults(engine.checkpoint.sampling_defaults)
    known = {*_FIELDS_WITH_MODEL_DEFAULTS, "max_new_tokens"}
    if unknown := sorted(overrides.keys() - known):
        raise ValueError(
            f"--override-generation-config has {unknown[0]!r}, which is none of "
            f"{', '.join(sorted(known))}."
        )
    renamed = {"max_tokens" if k == "max_new_tokens" else k: v for k, v in overrides.items()}
    try:
        SamplingParams(**renamed)
    except ParameterError as error:
        raise ValueError(f"--override-generation-config cannot be served: {error}") from None
    return {**defaults, **renamed}


def _checked_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's defaults, and say in the log what they are."""
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


def resolve_max_tokens(
    requested: int | None,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    cap: int | None = None,
    name: str = "max_tokens",
) -> int:
    """Return how many tokens a request may generate: what it asks for, cut to what fits.

    Args:
      requested: None: as many as fit.
      num_prompt_tokens: length of the prompt.
      max_model_len: longest prompt plus output.
      cap: the server's own limit, which cuts without an error; None: none.
      name: of the field that asks.

    Raises: ParameterError if it asks for no token, or for more than the whole context.
    """
    room = max_model_len - num_prompt_tokens
    if cap is not None:
        room = min(room, cap)
    if requested is None:
        return room
    if requested < 1:
        raise ParameterError(name, requested, "must be at least 1")
    if requested > max_model_len:
        raise ParameterError(name, requested, f"must not exceed max_model_len={max_model_len}")
    return min(requested, room)


def sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
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
    check_token_ids("logprob_token_ids", request.logprob_token_ids, vocab_size)
    if request.logprob_token_ids and logprobs is None:
        raise ApiError("logprob_token_ids needs logprobs.", param="logprob_token_ids")
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", request.allowed_token_ids, vocab_size)
    return SamplingParams(
        **chosen,
        n=1 if request.n is None else request.n,
        seed=None if request.seed == -1 else request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=request.logprob_token_ids,
        repetition_detection=_repetition_detection(request.repetition_detection),
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words,
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        structured_outputs=structured_outputs(request),
    )


def requested_prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return the alternatives per prompt token, None if their log probabilities are not wanted.

    Raises: ApiError if they are to be streamed, for which the chunks have no place.
    """
    wanted = request.prompt_logprobs
    if wanted is None or wanted is False:
        return None
    if request.stream and wanted != 0:
        raise ApiError(
            "prompt_logprobs is not available when stream is true; leave one of the two out.",
            param="prompt_logprobs",
        )
    return int(wanted)


def _repetition_detection(fields: RepetitionDetectionFields | None) -> RepetitionDetection | None:
    if fields is None or not fields.max_pattern_size:
        return None
    values = {name: value or 0 for name, value in msgspec.to_builtins(fields).items()}
    try:
        return RepetitionDetection(**values)
    except ValueError as error:
        raise ParameterError("repetition_detection", values, str(error)) from None


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
        # int() would take "1_0" and digits of other scripts, too, and fails beyond 4300 digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ParameterError("logit_bias", key, "must map token ids to numbers")
    ids = {int(key): value for key, value in bias.items()}
    check_token_ids("logit_bias", ids, vocab_size)
    return ids
