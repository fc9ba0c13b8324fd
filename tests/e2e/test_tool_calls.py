"""Demanded calls from a model that knows nothing of calls: their arguments obey the schemas."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from aiohttp.test_utils import TestClient, TestServer

from paged.scheduler.async_engine import AsyncEngine
from paged.server.app import make_app
from paged.server.settings import ServerSettings

LAMP = {
    "type": "object",
    "properties": {
        "room": {"enum": ["hall", "attic"]},
        "on": {"type": "boolean"},
        "levels": {"type": "array", "items": {"enum": [0, 25]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["room", "on"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 6}},
}
SCHEMAS = {"set_lamp": LAMP, "weather": CITY, "now": {"type": "object", "maxProperties": 0}}
TOOLS = [
    {"type": "function", "function": {"name": "set_lamp", "parameters": LAMP}},
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


class Chat:
    """Asks servers of one engine, which differ in their settings."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.Runner) -> None:
        self._engine = engine
        self._loop = loop

    def ask(self, bodies: list[dict[str, Any]], **settings: Any) -> list[Any]:
        """Return the choices of some requests that run together."""

        async def one(client: TestClient, body: dict[str, Any]) -> Any:
            messages = [{"role": "user", "content": "Lamp?"}]
            fields = {"messages": messages, "tools": TOOLS, "temperature": 1.5, **body}
            async with client.post("/v1/chat/completions", json=fields) as response:
                raw = await response.text()
                if response.status == 400:
                    return json.loads(raw)["error"]
                assert response.status == 200, raw
            if not body.get("stream"):
                return json.loads(raw)["choices"][0]
            blocks = raw.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
            return [json.loads(block[len("data: ") :])["choices"][0] for block in blocks]

        async def run() -> list[Any]:
            template = "{{ messages[0].content }}"
            app = make_app(
                self._engine, ServerSettings(chat_template=template, log_stats=False, **settings)
            )
            async with TestClient(TestServer(app)) as client:
                return await asyncio.gather(*(one(client, body) for body in bodies))

        return self._loop.run(run())


@pytest.fixture(scope="module")
def chat(tiny_model, tiny_config) -> Iterator[Chat]:
    with asyncio.Runner() as loop:
        engine = loop.run(AsyncEngine.create(str(tiny_model), tiny_config, progress=False))
        yield Chat(engine, loop)
        loop.run(engine.shutdown())


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic", "none"])
def test_demanded_calls_obey_their_schemas(chat, parser):
    bodies = [
        {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed} for seed in range(4)
    ]
    named = {"type": "function", "function": {"name": "set_lamp"}}
    bodies += [{"tool_choice": named, "seed": seed} for seed in range(2)]
    choices = chat.ask(bodies, tool_call_parser=parser)
    for body, choice in zip(bodies, choices, strict=True):
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        is_named = body["tool_choice"] == named
        assert choice["finish_reason"] == ("stop" if is_named else "tool_calls")
        assert not is_named or call["function"]["name"] == "set_lamp"
        check([call["function"]])


def test_stream_of_a_seed_says_what_the_whole_answer_says(chat):
    bodies = [{"tool_choice": "required", "max_tokens": 150, "seed": seed} for seed in range(4)]
    wholes = chat.ask(bodies, tool_call_parser="hermes")
    streams = chat.ask([{**body, "stream": True} for body in bodies], tool_call_parser="hermes")
    for whole, stream in zip(wholes, streams, strict=True):
        calls: list[dict[str, str]] = []
        for part in (part for choice in stream for part in choice["delta"].get("tool_calls", ())):
            if "id" in part:
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
        assert calls == [call["function"] for call in whole["message"]["tool_calls"]]
        assert stream[-1]["finish_reason"] == whole["finish_reason"]
        check(calls[:-1] if whole["finish_reason"] == "length" else calls)


MEASURE = {
    "type": "object",
    "properties": {
        "size": {"type": "number"},
        "count": {"type": "integer"},
        "sum": {"type": "number", "exclusiveMinimum": 0, "maximum": 9},
        "unit": {"type": "string", "pattern": "^(mm|m[0-9]{2})$"},
    },
    "required": ["size", "count", "sum", "unit"],
}


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "none"])
def test_calls_of_a_model_that_wants_nothing_but_digits_come_to_an_end(chat, parser):
    named = {"type": "function", "function": {"name": "measure"}}
    tool = {"type": "function", "function": {"name": "measure", "parameters": MEASURE}}
    digits = {str(ord(digit)): 100 for digit in "0123456789"}
    fields = {"tools": [tool], "tool_choice": named, "temperature": 2, "logit_bias": digits}
    choices = chat.ask([{**fields, "seed": seed} for seed in range(6)], tool_call_parser=parser)
    for choice in choices:
        # Three numbers of at most 32 characters fit into the 256 tokens of the context.
        assert choice["finish_reason"] == "stop", choice
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, MEASURE)
        assert len(str(arguments["count"])) <= 32


def test_schema_that_cannot_be_enforced_is_refused_where_a_call_is_demanded(chat):
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for tool_choice, is_refused in [("required", True), ("auto", False)]:
        body = {"tools": tools, "tool_choice": tool_choice, "max_tokens": 5}
        (answer,) = chat.ask([body], tool_call_parser="hermes")
        assert (answer.get("param") == "tools") == is_refused, answer
