"""Fields the reference understands and this version does not: refused aloud, never ignored."""

from paged.server.errors import ApiError
from paged.server.protocol import GenerationRequest

# Field -> what to do without it. A field counts as sent unless it is None or one of `_NEUTRAL`.
_REMEDIES = {
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


def _is_neutral(field: str, value: object) -> bool:
    return any(type(value) is type(n) and value == n for n in _NEUTRAL.get(field, ()))


def _unsupported(what: str, param: str, remedy: str) -> ApiError:
    return ApiError(f"{what} is not supported by this version. {remedy}", param=param)
