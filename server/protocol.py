"""Requests as typed structs, decoded from JSON with errors that name the field.

Only shape is checked here: types, lengths and required fields. What values mean is decided by
`sampling.py` and `prompts.py`; what this version cannot do is refused by `unsupported.py`.
Unknown fields are ignored, as OpenAI-compatible servers do. Clients send null for what they
leave to the server: every field that may be left out may be null, which is its default.
"""

import asyncio
import re
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from paged.scheduler.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from paged.server.errors import SCHEMA_ERROR, ApiError

BODY_TIMEOUT = web.AppKey("body_timeout", float)
"""Seconds that a request's body may take to arrive."""

# Bounds of lists and strings that would otherwise be limited by the size of the body alone and
# then be walked in Python on the event loop.
type ShortText = Annotated[str, Meta(max_length=4096)]
type StopStrings = ShortText | Annotated[list[ShortText], Meta(max_length=MAX_STOP_STRINGS)]
type TokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
type AllowedTokenIds = Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)]
type LogitBias = Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIASES)]
type BadWords = Annotated[list[ShortText], Meta(max_length=MAX_BAD_WORDS)]
_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])(?=.)", re.DOTALL)
# What is logged has no line breaks and no terminal escapes; `$` alone would let the last one pass.
_NO_CONTROLS = r"^[^\x00-\x1f\x7f]*$(?!\n)"
type RequestId = Annotated[str, Meta(max_length=256, pattern=_NO_CONTROLS)]
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
type Priority = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
type StreamInterval = Annotated[int, Meta(ge=1, le=INT64_MAX)]
type JsonObject = dict[str, Any]


class StreamOptions(Struct, kw_only=True):
    """`stream_options` of a streaming request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetectionFields(Struct, kw_only=True):
    """`repetition_detection`, see `paged.scheduler.repetition`."""

    max_pattern_size: int | None = 0
    min_pattern_size: int | None = 0
    min_count: int | None = 0


class StructuredOutputsFields(Struct, kw_only=True):
    """`structured_outputs`; what they mean is said at `StructuredOutputs`."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(Struct, kw_only=True):
    """Fields that both generation endpoints share; None stands for "not sent"."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = False
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    cache: Any = None  # checked by `handling.py`, whose error names the choices
    request_id: RequestId | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | bool | None = None
    logprob_token_ids: TokenIds | None = None
    repetition_detection: RepetitionDetectionFields | None = None
    stream_interval: StreamInterval | None = None

    # What the output must look like; `structured.py` says which go together.
    response_format: JsonObject | None = None
    structured_outputs: StructuredOutputsFields | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Known to the reference, refused by `unsupported.py` unless neutral.
    use_beam_search: bool | None = None
    thinking_token_budget: int | None = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


type PromptInput = str | list[str | int | list[int]]
"""A text, several, the token ids of one, or of several; "prompts.py" refuses mixtures."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: PromptInput
    logprobs: int | None = None
    add_special_tokens: bool | None = True
    suffix: str | None = None
    prompt_embeds: Any = None


class EmbeddingRequest(Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: PromptInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    cache: Any = None  # as in `GenerationRequest`
    request_id: RequestId | None = None
    priority: Priority | None = None


class ContentPart(Struct, kw_only=True):
    """One part of a message; only text can be served, in the field that its type has."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class ChatMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_prompt_text: bool | None = None

    # How the conversation becomes a prompt.
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: list[JsonObject] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class TokenizeTextRequest(Struct, kw_only=True):
    """Body of POST /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest, kw_only=True):
    """Body of POST /tokenize with a conversation: what the chat endpoint would prefill."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


type AdapterName = Annotated[str, Meta(max_length=256, pattern=_NO_CONTROLS)]


class LoadAdapterRequest(Struct, kw_only=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: AdapterName | None = None
    lora_path: Annotated[str, Meta(max_length=4096, pattern=_NO_CONTROLS)] | None = None
    load_inplace: bool | None = False
    is_3d_lora_weight: bool | None = False


class UnloadAdapterRequest(Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str | None = None
    lora_int_id: int | None = None  # of the reference's, which does not look at it either


async def read_json(request: web.Request) -> bytes:
    """Return the body of a JSON request.

    Raises: ApiError if the media type is not JSON (400), the body exceeds the limit (413) or does
      not arrive in time (408).
    """
    if request.content_type.lower() != "application/json":
        raise ApiError(
            "Unsupported Media Type: Only 'application/json' is allowed", type=SCHEMA_ERROR
        )
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        # Refused by its header: nothing of it need be kept in memory.
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    seconds = request.app[BODY_TIMEOUT]
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        # What is left of it would be waited for before the next request of the connection.
        raise ApiError(
            f"The request body did not arrive within {seconds:g} s; send it faster, or raise "
            "--body-timeout.",
            status=408,
            headers={"Connection": "close"},
        ) from None


def decode_body[T](raw: bytes, kind: type[T]) -> T:
    """Return the request of type `kind` that a JSON body holds.

    Raises: ApiError with the dotted path of the field, such as "body.messages.0.role".
    """
    try:
        raw.decode()  # also where fields are skipped, which the decoder does not look into
        # As the reference: "10" and 10.0 are integers, too.
        return msgspec.json.decode(raw, type=kind, strict=False)
    except UnicodeDecodeError as error:
        raise _malformed(f"invalid UTF-8 at byte {error.start}", f"body.{error.start}") from None
    except msgspec.ValidationError as error:
        raise _schema_error(str(error)) from None
    except msgspec.DecodeError as error:
        position = re.search(r"\(byte (\d+)\)", str(error))
        where = position[1] if position else str(len(raw))
        # Close to the end the decoder calls it truncated, as it looks for the other half.
        is_half = position is None and _HALF_A_PAIR.search(raw[-12:]) is not None
        reason = "a surrogate without its other half" if is_half else str(error)
        raise _malformed(reason, f"body.{where}") from None
    except RecursionError:
        raise _malformed("nested too deeply", "body") from None


def _malformed(reason: str, where: str) -> ApiError:
    return ApiError(
        f"The request body is not valid JSON: {reason}.", type=SCHEMA_ERROR, param=where
    )


def _schema_error(text: str) -> ApiError:
    """Turn "Expected `int`, got `str` - at `$.stop[0]`" into an error naming "stop.0"."""
    reason, _, path = text.partition(" - at `$")
    names = re.findall(r"[^.\[\]`]+", path.rstrip("`").replace("[...]", ""))
    missing = re.fullmatch(r"Object missing required field `(\w+)`", reason)
    if missing:
        names.append(missing[1])
        reason = "Field required"
    field = ".".join(names)
    message = f"{field}: {reason}." if field else f"The request body is wrong: {reason}."
    return ApiError(message, type=SCHEMA_ERROR, param=".".join(["body", *names]))
