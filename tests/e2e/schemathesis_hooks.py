"""Makes generated bodies meaningful more often: most random names of a model are just unknown."""

import json
import zlib
from typing import Any

import schemathesis

# What makes nearly every random value a mistake that one check finds before anything else runs.
_RARELY_VALID = {
    "allowed_token_ids", "bad_words", "cache", "cache_salt", "chat_template", "documents",
    "frequency_penalty", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "kv_transfer_params", "logit_bias", "logprob_token_ids", "logprobs", "max_completion_tokens",
    "max_tokens", "media_io_kwargs", "min_p", "min_tokens", "mm_processor_kwargs", "n",
    "presence_penalty", "prompt_embeds", "prompt_logprobs", "repetition_detection",
    "repetition_penalty", "response_format", "seed", "stop_token_ids", "stream_interval",
    "stream_options", "structured_outputs", "suffix", "temperature", "thinking_token_budget",
    "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens",
    "use_beam_search", "vllm_xargs", "background", "conversation", "include",
    "max_output_tokens", "max_tool_calls", "previous_response_id", "truncation", "text",
}  # fmt: skip


@schemathesis.hook
def before_call(_context: Any, case: schemathesis.Case, **_kwargs: Any) -> None:
    """Leave out the model, and of half of the bodies, by their content, what is rarely valid.

    What is meant to be wrong stays wrong.
    """
    body = case.body
    if not isinstance(body, dict) or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    digest = zlib.crc32(json.dumps(body, sort_keys=True, default=str).encode())
    if digest % 8:
        body = {name: value for name, value in body.items() if name != "model"}
    if digest % 16 < 8:
        body = {name: value for name, value in body.items() if name not in _RARELY_VALID}
        # An endless answer of noise takes longer than it teaches.
        if "prompt" in body or "messages" in body:
            body["max_tokens"] = 3
        elif case.operation.path == "/v1/responses":
            body["max_output_tokens"] = 3
    case.body = body
