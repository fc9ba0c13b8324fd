"""The whole answer of a chat, and what its stream says in the same way."""

from collections.abc import Sequence
from typing import Any

from paged.scheduler.output import PositionLogprobs
from paged.server.answers import (
    AnswerFormat,
    AnswerReader,
    count_reasoning_tokens,
    message_fields,
)
from paged.server.conversation import text_of
from paged.server.generation import Choice, Generation
from paged.server.logprobs import chat_logprobs, prompt_logprobs_body
from paged.server.protocol import ChatCompletionRequest

_OBJECT = "chat.completion"


async def chat_body(
    generation: Generation, request: ChatCompletionRequest, format: AnswerFormat | None
) -> dict[str, Any]:
    """Run a generation to its end and return the body of the answer."""
    samples = await generation.choices()
    readers = [] if format is None else [format.reader() for _ in samples]
    choices = [
        _choice(generation, request, sample, index, readers[index] if readers else None)
        for index, sample in enumerate(samples)
    ]
    num_reasoning_tokens = await count_reasoning_tokens(generation.context, readers)
    (prompt,) = generation.prompts
    return {
        **generation.envelope(_OBJECT),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": generation.context.fingerprint,
        "usage": generation.usage.body(num_reasoning_tokens),
        "prompt_logprobs": prompt_logprobs_body(generation.prompt_logprobs.get(0)),
        "prompt_token_ids": prompt.token_ids if request.return_token_ids else None,
        "prompt_text": prompt.text if request.return_prompt_text else None,
        "kv_transfer_params": None,
    }


def _choice(
    generation: Generation,
    request: ChatCompletionRequest,
    choice: Choice,
    index: int,
    reader: AnswerReader | None,
) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": choice.text}
    finish_reason = choice.finish_reason
    if reader is not None:
        fields = message_fields(reader.feed(choice.text) + reader.finish(), reader.make_id)
        finish_reason = reader.finish_reason(finish_reason)
    if echo := echo_of(generation, request):
        fields["content"] = echo + (fields["content"] or "")
    shows_tokens = reader is None or not reader.format.hides_tokens
    logprobs = logprobs_of(generation, request, choice.token_ids, choice.logprobs)
    return {
        "index": index,
        "message": {
            "role": response_role(generation, request),
            "content": fields.pop("content"),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({"tool_calls": fields.pop("tool_calls")} if "tool_calls" in fields else {}),
            "reasoning": None,
            **fields,
        },
        "logprobs": logprobs if shows_tokens else None,
        "finish_reason": finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if request.return_token_ids and shows_tokens else None,
    }


def num_shown_logprobs(request: ChatCompletionRequest) -> int:
    """Return how many candidates each position lists."""
    if request.logprob_token_ids:
        return 1 + len(request.logprob_token_ids)
    return request.top_logprobs or 0


def response_role(generation: Generation, request: ChatCompletionRequest) -> str:
    """Return the answer's role: that of the last message where this one is continued."""
    if request.add_generation_prompt is not False or not request.messages:
        return generation.context.settings.response_role
    return request.messages[-1].role


def echo_of(generation: Generation, request: ChatCompletionRequest) -> str:
    """Return the last message if it is wanted in front of the answer and has the same role."""
    if not request.echo or not request.messages:
        return ""
    last = request.messages[-1]
    return text_of(last) if last.role == response_role(generation, request) else ""


def logprobs_of(
    generation: Generation,
    request: ChatCompletionRequest,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
) -> dict[str, Any] | None:
    """Return the `logprobs` of tokens; None if they are not wanted."""
    if not request.logprobs:
        return None
    return chat_logprobs(
        generation.context.engine.tokenizer,
        token_ids,
        positions,
        num_top=num_shown_logprobs(request),
        as_token_ids=generation.spells_token_ids,
    )
