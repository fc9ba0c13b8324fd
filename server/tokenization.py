"""POST /tokenize and /detokenize."""

from typing import Any

import msgspec
from aiohttp import web

from paged.server.answer_bodies import DetokenizeAnswer, TokenizeAnswer
from paged.server.context import CONTEXT
from paged.server.conversation import render_chat
from paged.server.errors import json_response
from paged.server.prompts import vocab_size
from paged.server.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    decode_body,
    read_json,
)
from paged.server.sampling import check_token_ids
from paged.server.text_codec import decode, encode
from paged.server.tools import check_tools


class _Shape(msgspec.Struct):
    """Tells the two kinds of /tokenize bodies apart."""

    messages: Any = None


async def tokenize(http_request: web.Request) -> web.Response:
    """Return the token ids of a text, or of a conversation as the chat endpoint would see it."""
    context = http_request.app[CONTEXT]
    raw = await read_json(http_request)
    request: TokenizeChatRequest | TokenizeTextRequest
    if decode_body(raw, _Shape).messages is not None:
        request = decode_body(raw, TokenizeChatRequest)
        context.models.find(request.model)
        check_tools(request)
        text = await render_chat(context, request)
        adds_special_tokens = bool(request.add_special_tokens)
    else:
        request = decode_body(raw, TokenizeTextRequest)
        context.models.find(request.model)
        text = request.prompt
        adds_special_tokens = request.add_special_tokens is not False
    tokenizer = context.engine.tokenizer
    (ids,) = await encode(tokenizer, [text], add_special_tokens=adds_special_tokens)
    token_strs = None
    if request.return_token_strs:
        token_strs = [tokenizer.token_text(token_id) for token_id in ids]
    return json_response(
        TokenizeAnswer(
            count=len(ids),
            max_model_len=context.engine.max_model_len,
            tokens=ids,
            token_strs=token_strs,
        )
    )


async def detokenize(http_request: web.Request) -> web.Response:
    """Return the text of token ids, special tokens included."""
    context = http_request.app[CONTEXT]
    request = decode_body(await read_json(http_request), DetokenizeRequest)
    context.models.find(request.model)
    check_token_ids("tokens", request.tokens, vocab_size(context))
    text = await decode(context.engine.tokenizer, request.tokens)
    return json_response(DetokenizeAnswer(prompt=text))
