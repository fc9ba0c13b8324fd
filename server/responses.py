"""/v1/responses: answers with a memory, made of the same conversations as chat completions."""

import contextlib
import uuid
from collections.abc import Iterator

from aiohttp import web

from paged.server.answers import AnswerFormat, answer_format
from paged.server.auth import TENANT
from paged.server.chat import chat_params, num_logprobs_of
from paged.server.context import CONTEXT
from paged.server.errors import ApiError, json_response, to_api_error
from paged.server.generation import Generation
from paged.server.handling import handling_of
from paged.server.limits import check_limits
from paged.server.prompts import chat_prompt
from paged.server.protocol import ChatCompletionRequest, decode_body, read_json
from paged.server.response_answers import (
    DeletedResponse,
)
from paged.server.response_request import (
    ResponseRequest,
    chat_request,
    input_messages,
    refuse_unsupported_fields,
    renamed,
)
from paged.server.response_run import ResponseRun
from paged.server.response_store import StoredResponse
from paged.server.served_models import ServedModel
from paged.server.streaming import send_events
from paged.server.tools import check_tools
from paged.server.unsupported import refuse_unsupported


async def create_response(http_request: web.Request) -> web.StreamResponse:
    """Answer an input, behind an earlier response if it names one."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    raw = await read_json(http_request)
    request = decode_body(raw, ResponseRequest)
    model = context.models.find(request.model)
    refuse_unsupported_fields(request)
    earlier = _earlier(http_request, request)
    messages = [*(earlier.messages if earlier else ()), *input_messages(request)]
    with _names_of_this_endpoint():
        as_chat = chat_request(request, messages)
        generation, format = await _generation(http_request, model, as_chat)
    run = ResponseRun(
        generation,
        request,
        as_chat,
        format,
        messages=messages,
        tenant=http_request.get(TENANT, ""),
        num_bytes=len(raw) + (earlier.num_bytes if earlier else 0),
    )
    if request.background:
        return json_response(run.start_in_background(context))
    if request.stream:
        return await send_events(http_request, run.events(), end=b"")
    return json_response(await run.answer())


async def show_response(request: web.Request) -> web.Response:
    """Return a stored response."""
    stored = request.app[CONTEXT].responses.get(request.get(TENANT, ""), request.match_info["id"])
    return json_response(stored.answer)


async def delete_response(request: web.Request) -> web.Response:
    """Forget a stored response; those that followed it keep what they need of it."""
    context, tenant = request.app[CONTEXT], request.get(TENANT, "")
    response_id = request.match_info["id"]
    context.responses.get(tenant, response_id)
    await context.response_tasks.cancel(tenant, response_id)
    context.responses.delete(tenant, response_id)
    return json_response(DeletedResponse(id=response_id))


async def cancel_response(request: web.Request) -> web.Response:
    """End a response that runs in the background; one that has ended stays as it is."""
    context, tenant = request.app[CONTEXT], request.get(TENANT, "")
    answer = context.responses.get(tenant, request.match_info["id"]).answer
    if not answer.background:
        raise ApiError(
            "Only a response with background: true can be cancelled; to end one that streams, "
            "close its connection."
        )
    await context.response_tasks.cancel(tenant, answer.id)
    return json_response(context.responses.get(tenant, answer.id).answer)


def _earlier(http_request: web.Request, request: ResponseRequest) -> StoredResponse | None:
    if request.previous_response_id is None:
        return None
    stored = http_request.app[CONTEXT].responses.get(
        http_request.get(TENANT, ""), request.previous_response_id, param="previous_response_id"
    )
    if stored.answer.status not in ("completed", "incomplete"):
        raise ApiError(
            f"The response {stored.answer.id} is {stored.answer.status}; only what was answered "
            "can be gone on from.",
            param="previous_response_id",
        )
    return stored


async def _generation(
    http_request: web.Request, model: ServedModel, request: ChatCompletionRequest
) -> tuple[Generation, AnswerFormat | None]:
    """Return the run of a conversation, and how its text is taken apart."""
    context = http_request.app[CONTEXT]
    refuse_unsupported(request)
    check_limits(context.settings, request)
    check_tools(request)
    handling = handling_of(http_request, request)
    num_logprobs = num_logprobs_of(request)
    prompt = await chat_prompt(context, request)
    format = answer_format(context, request, prompt)
    params = chat_params(context, request, prompt, num_logprobs)
    generation = Generation(
        context=context,
        model=model,
        request=request,
        # Not the client's own id, which need not be unique: it is a key of the store.
        response_id=f"resp_{uuid.uuid4().hex}",
        prompts=[prompt],
        params=[params if format is None else format.adjusted(params)],
        handling=handling,
    )
    return generation, format


@contextlib.contextmanager
def _names_of_this_endpoint() -> Iterator[None]:
    """Let errors of the chat endpoint's code name the fields as they are called here."""
    try:
        yield
    except Exception as error:
        raise renamed(to_api_error(error)) from error
