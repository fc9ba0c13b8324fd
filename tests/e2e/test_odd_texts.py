"""Texts that are hardly texts, in every field that takes one: no body breaks over them.

The fields are read off the structs, so a new one is tested by being there.
"""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import inspect

from paged.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from paged.server.response_request import ResponseRequest

TEXTS = ["", " ", "\n", "\t \r\n", "\u3000", "\0", "\u200b", "\ufeff", "\u0301", "\ufffd", "\u202e"]
TEXTS += ["😀", "<eos>", "a" * 300]
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: list[tuple[str, type, dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", ResponseRequest, {"input": "a", "max_output_tokens": 2}),
    ("/v1/embeddings", EmbeddingRequest, {"input": "a"}),
    ("/tokenize", TokenizeTextRequest, {"prompt": "a"}),
    ("/tokenize", TokenizeChatRequest, {"messages": MESSAGES}),
    ("/detokenize", DetokenizeRequest, {"tokens": [97]}),
]


def texts_in(node: inspect.Type, text: str, depth: int = 4) -> Iterator[Any]:
    """Yield values of a type that have a text in each place where there can be one."""
    match node:
        case inspect.StrType():
            yield text
        case inspect.AnyType():
            yield from (text, [text], {text: text})
        case inspect.ListType(item_type=item) if depth:
            yield from ([value] for value in texts_in(item, text, depth - 1))
        case inspect.DictType(value_type=inner) if depth:
            yield from ({text: value} for value in texts_in(inner, text, depth - 1))
            yield {text: 1}
        case inspect.UnionType(types=types):
            for inner in types:
                yield from texts_in(inner, text, depth)
        case inspect.StructType(fields=fields) if depth:
            needed = {f.encode_name: "text" for f in fields if f.required}
            for field in fields:
                for value in texts_in(field.type, text, depth - 1):
                    yield {**needed, field.encode_name: value}


def bodies(kind: type, base: dict[str, Any]) -> list[dict[str, Any]]:
    fields = inspect.type_info(kind).fields
    return [
        {**base, field.encode_name: value}
        for field in fields
        for text in TEXTS
        for value in texts_in(field.type, text)
    ]


@pytest.mark.parametrize(
    ("path", "kind", "base"), BODIES, ids=[kind.__name__ for _, kind, _ in BODIES]
)
def test_no_text_in_any_field_breaks_the_server(tiny_url, path, kind, base):
    sent = bodies(kind, base)
    with httpx.Client(base_url=tiny_url, timeout=200) as client:

        def status(body: dict[str, Any]) -> int:
            return client.post(path, json=body).status_code

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            got = list(pool.map(status, sent))
    assert len(sent) >= len(TEXTS)
    wrong = [(code, body) for code, body in zip(got, sent, strict=True) if code >= 500]
    assert not wrong, wrong[:5]
    assert 200 in got
