"""The bodies of answers as structs: what `/openapi.json` says is what is sent.

A field with a default may be absent; none beyond these are ever sent, which
tests/e2e/test_openapi.py holds the server to.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class Answer(Struct, forbid_unknown_fields=True):
    """Base of all bodies: the document promises that there is nothing else in them."""


class ErrorDetail(Answer):
    """What is wrong; `code` repeats the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(Answer):
    """Body of every answer that is an error."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Of the generated tokens, those of the reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts of one request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


# -- Completions


class CompletionLogprobs(Answer):
    """Parallel lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Answer):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_logprobs: list[Any] | None
    prompt_token_ids: list[int] | None


class CompletionAnswer(Answer):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None


class CompletionChunkChoice(Answer):
    """What one event adds to one sample."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    prompt_logprobs: list[Any] | UnsetType | None = UNSET


class CompletionChunk(Answer):
    """One event of a streamed completion; the last one may have usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET


# -- Chat


class FunctionCall(Answer):
    """A function's name and its arguments, which are JSON in a string."""

    name: str
    arguments: str


class ToolCall(Answer):
    """One call that the model wants made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(Answer):
    """The name comes whole and first, the arguments in pieces."""

    name: str | UnsetType | None = UNSET
    arguments: str | UnsetType | None = UNSET


class ToolCallDelta(Answer):
    """What one event adds to one call."""

    index: int
    id: str | UnsetType | None = UNSET
    type: Literal["function"] | UnsetType | None = UNSET
    function: FunctionDelta | UnsetType | None = UNSET


class TokenLogprob(Answer):
    """One candidate and the exact bytes of its token."""

    token: str
    logprob: float
    bytes: list[int] | None


class PositionLogprobs(TokenLogprob):
    """The token of one position, and the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[PositionLogprobs] | None


class Message(Answer):
    """What the model says."""

    role: str
    content: str | None
    refusal: str | None
    annotations: list[Any] | None
    audio: dict[str, Any] | None
    function_call: dict[str, Any] | None
    reasoning: str | None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    """One sample."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatCompletionAnswer(Answer):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: list[Any] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: dict[str, Any] | None


class MessageDelta(Answer):
    """What one event adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """What one event adds to one sample."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatCompletionChunk(Answer):
    """One event of a streamed chat completion; the last one may have usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_logprobs: list[Any] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: str | UnsetType | None = UNSET
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET


# -- Embeddings


class Embedding(Answer):
    """The vector of one input, as numbers or as base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Answer):
    """Token counts of one request for vectors."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingAnswer(Answer):
    """Answer of POST /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


# -- Tokenizer


class TokenizeAnswer(Answer):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """Answer of POST /detokenize."""

    prompt: str


# -- Operations


class ModelPermission(Answer):
    """What old OpenAI clients expect on a card; it grants nothing here."""

    id: str
    created: int
    object: Literal["model_permission"] = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Answer):
    """One served name."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    permission: list[ModelPermission]
    object: Literal["model"] = "model"
    owned_by: str = "paged"
    parent: str | None = None


class ModelList(Answer):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class VersionAnswer(Answer):
    """Answer of GET /version."""

    version: str


class LoadAnswer(Answer):
    """Answer of GET /load: requests in flight."""

    server_load: int


class SuccessAnswer(Answer):
    """Whether it was done."""

    success: bool
