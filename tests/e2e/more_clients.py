"""langchain-openai and litellm against a server: python more_clients.py URL. Prints what it saw.

Runs in an environment of its own, see test_more_clients.py; nothing of this project is imported.
"""

import json
import sys
from typing import Any

import litellm
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

SCHEMA = {
    "title": "verdict",
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": PARAMETERS},
}


def langchain(url: str) -> dict[str, Any]:
    chat = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_tokens=100, max_retries=0)
    chunks = list(chat.stream("Hi", stream_usage=True))
    caller = chat.bind_tools([TOOL], tool_choice="required")
    called = caller.invoke("Hi")
    streamed = None
    for chunk in caller.stream("Hi"):
        streamed = chunk if streamed is None else streamed + chunk
    verdict = chat.with_structured_output(SCHEMA, method="json_schema").invoke("Hi")
    options: dict[str, Any] = {"check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(base_url=url, api_key="none", model="tiny", **options)
    return {
        "tokens": sum(
            chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata
        ),
        "call": [called.tool_calls[0]["name"], called.tool_calls[0]["args"]],
        "streamed_call": [streamed.tool_calls[0]["name"], streamed.tool_calls[0]["args"]],
        "verdict": verdict["answer"],
        "vectors": [len(vector) for vector in embeddings.embed_documents(["a", "b"])],
    }


def lite(url: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "model": "hosted_vllm/tiny",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
    }
    options = {"include_usage": True}
    chunks = list(litellm.completion(**common, stream=True, stream_options=options))
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    called = litellm.completion(**common, **tools)
    streamed = litellm.stream_chunk_builder(
        list(litellm.completion(**common, **tools, stream=True))
    )
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    verdict = litellm.completion(**common, response_format=form)

    def call(answer: Any) -> list[Any]:
        function = answer.choices[0].message.tool_calls[0].function
        return [function.name, json.loads(function.arguments)]

    return {
        "tokens": chunks[-1].usage.completion_tokens,
        "call": call(called),
        "streamed_call": call(streamed),
        "verdict": json.loads(verdict.choices[0].message.content)["answer"],
    }


if __name__ == "__main__":
    address = f"{sys.argv[1]}/v1"
    print(json.dumps({"langchain": langchain(address), "litellm": lite(address)}))
