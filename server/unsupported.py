"""Fields the reference understands and this version does not: refused aloud, never ignored."""

from paged.server.errors import ApiError
from paged.server.protocol import ChatCompletionRequest, GenerationRequest

# Field -> what to do without it. A field counts as sent unless it is None or one of `_NEUTRAL`.
_REMEDIES = {
    "structured_outputs": "Ask for the format in the prompt and check the answer.",
    "guided_json": "Ask for the format in the prompt and check the answer.",
    "guided_regex": "Ask for the format in the prompt and check the answer.",
    "guided_choice": "Ask for the format in the prompt and check the answer.",
    "guided_grammar": "Ask for the format in the prompt and check the answer.",
    "use_beam_search": "Leave it out; use `n` with a temperature for several answers.",
    "thinking_token_budget": "Use `max_tokens`.",
    "kv_transfer_params": "Leave it out.",
    "vllm_xargs": "Leave it out.",
    "suffix": "Put the text that follows into the prompt.",
    "prompt_embeds": "Send the prompt as text or token ids.",
    "mm_processor_kwargs": "Leave it out; only text is served.",
    "media_io_kwargs": "Leave it out; only text is served.",
}

# By type, too: `==` would make 0 equal to False.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "thinking_token_budget": (-1,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "suffix": ("",),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raise the error of the first field that asks for something this version cannot do."""
    for field, remedy in _REMEDIES.items():
        value = getattr(request, field, None)
        if value is not None and not _is_neutral(field, value):
            raise _unsupported(f"`{field}`", field, remedy)
    _check_response_format(request)
    if isinstance(request, ChatCompletionRequest):
        check_tools(request)


def check_tools(request: ChatCompletionRequest) -> None:
    """Let tools through only as text of the prompt: nothing here reads a model's tool calls."""
    if request.tools is not None and not request.tools:
        raise ApiError("tools must not be empty; leave it out.", param="tools")
    if request.tool_choice not in (None, "none") and request.tools is None:
        raise ApiError("tool_choice needs tools; send both or neither.", param="tool_choice")
    if request.tools is not None and request.tool_choice != "none":
        raise _unsupported(
            f"tool_choice {request.tool_choice or 'auto'!r}",
            "tool_choice",
            'Send tool_choice "none" to show the tools to the model and read its answer as text.',
        )


def _check_response_format(request: GenerationRequest) -> None:
    if request.response_format is None:
        return
    kind = request.response_format.get("type")
    if kind in ("json_object", "json_schema", "structural_tag"):
        remedy = "Ask for the format in the prompt and check the answer."
        raise _unsupported(f"response_format type {kind!r}", "response_format", remedy)
    if kind != "text":
        raise ApiError(
            "response_format must be an object whose `type` is 'text' (the only one this version "
            "supports), 'json_object', 'json_schema' or 'structural_tag'.",
            param="response_format",
        )


def _is_neutral(field: str, value: object) -> bool:
    return any(type(value) is type(n) and value == n for n in _NEUTRAL.get(field, ()))


def _unsupported(what: str, param: str, remedy: str) -> ApiError:
    return ApiError(f"{what} is not supported by this version. {remedy}", param=param)
