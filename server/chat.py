"""POST /v1/chat/completions."""

from aiohttp import web

from paged.scheduler.params import MAX_LOGPROBS, ParameterError, SamplingParams
from paged.server.answers import answer_format
from paged.server.chat_answer import chat_body
from paged.server.chat_stream import chat_chunks
from paged.server.context import CONTEXT, ServerContext
from paged.server.errors import ApiError, json_response
from paged.server.generation import Generation, check_stream_options, response_id
from paged.server.handling import handling_of
from paged.server.limits import check_limits
from paged.server.prompts import Prompt, chat_prompt, vocab_size
from paged.server.protocol import ChatCompletionRequest, decode_body, read_json
from paged.server.sampling import (
    requested_prompt_logprobs,
    resolve_max_tokens,
    sampling_params,
)
from paged.server.streaming import send_events
from paged.server.tools import check_tools
from paged.server.unsupported import refuse_unsupported


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    request = decode_body(await read_json(http_request), ChatCompletionRequest)
    model = context.models.find(request.model)
    refuse_unsupported(request)
    check_limits(context.settings, request)
    check_tools(request)
    check_stream_options(request)
    handling = handling_of(http_request, request)
    num_logprobs = num_logprobs_of(request)
    prompt = await chat_prompt(context, request)
    format = answer_format(context, request, prompt)
    params = chat_params(context, request, prompt, num_logprobs)
    generation = Generation(
        context=context,
        model=model,
        request=request,
        response_id=response_id(http_request, request, "chatcmpl"),
        prompts=[prompt],
        params=[params if format is None else format.adjusted(params)],
        handling=handling,
    )
    if request.stream:
        return await send_events(http_request, chat_chunks(generation, request, format))
    return json_response(await chat_body(generation, request, format))


def chat_params(
    context: ServerContext, request: ChatCompletionRequest, prompt: Prompt, num_logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters of a conversation's answer."""
    requested, name = request.max_completion_tokens, "max_completion_tokens"
    if requested is None:
        requested, name = request.max_tokens, "max_tokens"
    if requested is None and "max_tokens" in context.sampling_defaults:
        # The model's own limit, unlike a client's, may exceed a context that was made shorter.
        limit = context.engine.max_model_len
        requested = min(context.sampling_defaults["max_tokens"], limit)
    return sampling_params(
        request,
        context.sampling_defaults,
        max_tokens=resolve_max_tokens(
            requested,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=context.engine.max_model_len,
            cap=context.max_tokens_cap,
            name=name,
        ),
        logprobs=num_logprobs,
        prompt_logprobs=requested_prompt_logprobs(request),
        vocab_size=vocab_size(context),
    )


def num_logprobs_of(request: ChatCompletionRequest) -> int | None:
    """Return the alternatives per token, None if log probabilities are not wanted."""
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise ParameterError("top_logprobs", top, f"must be in [0, {MAX_LOGPROBS}]")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    return top if request.logprobs else None
