"""From what a request says to the token ids that are prefilled: text, ids or a conversation."""

from dataclasses import dataclass
from typing import cast

from paged.server.context import ServerContext
from paged.server.conversation import render_chat
from paged.server.errors import ApiError
from paged.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    PromptInput,
)
from paged.server.sampling import check_token_ids
from paged.server.text_codec import encode


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be prefilled.

    Attributes:
      token_ids: at least one, shorter than the model's context.
      text: as the client gave it or the template rendered it; None if given, or cut, as ids.
    """

    token_ids: list[int]
    text: str | None


async def completion_prompts(context: ServerContext, request: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a completion request, in order.

    Raises: ApiError or ParameterError naming "prompt" or "truncate_prompt_tokens".
    """
    return await _prompts(context, request.prompt, request, "prompt")


async def embedding_prompts(context: ServerContext, request: EmbeddingRequest) -> list[Prompt]:
    """Return the prompts of an embedding request, in order.

    Raises: ApiError or ParameterError naming "input" or "truncate_prompt_tokens".
    """
    return await _prompts(context, request.input, request, "input")


async def _prompts(
    context: ServerContext,
    prompt: PromptInput,
    request: CompletionRequest | EmbeddingRequest,
    param: str,
) -> list[Prompt]:
    texts, ids = _split(prompt, param, context.settings.max_prompts)
    if request.truncate_prompt_tokens is None:
        for text in texts:
            _check_text_length(context, text, param)
    for one in ids:
        check_token_ids(param, one, vocab_size(context))
    encoded = await encode(
        context.engine.tokenizer,
        texts,
        add_special_tokens=request.add_special_tokens is not False,
    )
    prompts = [Prompt(one, text) for one, text in zip(encoded, texts, strict=True)]
    prompts += [Prompt(one, None) for one in ids]
    return [_fit(context, request, prompt, param) for prompt in prompts]


async def chat_prompt(context: ServerContext, request: ChatCompletionRequest) -> Prompt:
    """Return the prompt of a conversation.

    Raises: ApiError for what the template refuses, or a prompt that does not fit.
    """
    text = await render_chat(context, request)
    if request.truncate_prompt_tokens is None:
        _check_text_length(context, text, "messages")
    (ids,) = await encode(
        context.engine.tokenizer, [text], add_special_tokens=bool(request.add_special_tokens)
    )
    return _fit(context, request, Prompt(ids, text), "messages")


def vocab_size(context: ServerContext) -> int:
    """Return the number of token ids that the model can embed."""
    return context.engine.checkpoint.model_config.vocab_size


def _split(prompt: PromptInput, param: str, max_prompts: int) -> tuple[list[str], list[list[int]]]:
    """Return the prompts of the four forms as (texts, lists of ids); one of them is empty."""

    def bad(rule: str) -> ApiError:
        return ApiError(f"{param} {rule}.", param=param)

    if isinstance(prompt, str):
        prompt = [prompt]
    # Prompts of millions of ids are walked by builtins only.
    kinds = set(map(type, prompt))
    if not kinds:
        raise bad("must not be an empty list")
    if len(kinds) > 1:
        raise bad("must not mix texts, token ids and lists of token ids")
    if kinds == {int}:
        prompt = [cast("list[int]", prompt)]
    if len(prompt) > max_prompts:
        raise bad(
            f"must hold at most {max_prompts} prompts (the server's --max-prompts), got "
            f"{len(prompt)}"
        )
    if not all(prompt):
        raise bad("must not be empty")
    if kinds == {str}:
        return cast("list[str]", prompt), []
    return [], cast("list[list[int]]", prompt)


def _check_text_length(context: ServerContext, text: str, param: str) -> None:
    """Refuse a text that cannot fit before spending time on tokenizing it."""
    limit = context.engine.max_model_len
    at_least = -(-len(text) // context.max_token_chars)
    if at_least >= limit:
        raise _too_long(limit, f"at least {at_least}", param)


def _fit(
    context: ServerContext,
    request: GenerationRequest | EmbeddingRequest,
    prompt: Prompt,
    param: str,
) -> Prompt:
    """Cut a prompt as the request asks and check that an output token still fits."""
    limit = context.engine.max_model_len
    cut = request.truncate_prompt_tokens
    if cut is not None:
        if cut != -1 and not 1 <= cut <= limit:
            raise ApiError(
                f"truncate_prompt_tokens must be -1 (as much as fits) or in [1, {limit}], "
                f"got {cut}.",
                param="truncate_prompt_tokens",
            )
        keep = limit - 1 if cut == -1 else cut
        ids = prompt.token_ids
        if len(ids) > keep:
            prompt = Prompt(ids[:keep] if request.truncation_side == "right" else ids[-keep:], None)
    if not prompt.token_ids:
        raise ApiError(f"{param} must hold at least one token.", param=param)
    if len(prompt.token_ids) >= limit:
        raise _too_long(limit, str(len(prompt.token_ids)), param)
    return prompt


def _too_long(limit: int, count: str, param: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {limit} tokens, but the prompt has {count} and "
        "at least one output token must fit behind it; shorten it, send truncate_prompt_tokens, "
        "or start the server with a larger --max-model-len.",
        param=param,
    )
