"""The OpenAPI document: all routes, keys, schemas that a validator understands."""

import re
from typing import Any

import jsonschema
import pytest

from paged.server.app import make_app
from paged.server.playground import PAGE_PATHS
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, COMPLETIONS, Client, ok, stream, with_server

KEY = "a-key"
ALL = {"dev_mode": True, "allow_runtime_lora_updating": True}


def document(**settings: Any) -> dict[str, Any]:
    async def test(client: Client) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with client.get("/openapi.json", headers=headers) as response:
            assert response.status == 200
            return await response.json()

    return with_server(test, **settings)


def check(instance: Any, schema: dict[str, Any], whole: dict[str, Any]) -> None:
    """Check a value against a schema of the document, whose references point into it."""
    rooted = {"components": whole["components"], **schema}
    jsonschema.Draft202012Validator(rooted).validate(instance)


def success(whole: dict[str, Any], path: str) -> dict[str, Any]:
    return whole["paths"][path]["post"]["responses"]["200"]["content"]


def test_every_route_of_the_application_is_described():
    described = {
        (method.upper(), path)
        for path, operations in document(**ALL)["paths"].items()
        for method in operations
    }
    app = make_app(FakeEngine(), ServerSettings(**ALL))
    routes = {(route.method, route.resource.canonical) for route in app.router.routes()}
    assert described == {(method, path) for method, path in routes if method != "HEAD"}


def test_routes_of_development_are_described_where_they_are_served():
    assert "/reset_prefix_cache" not in document()["paths"]


def test_keys_are_described_where_they_are_asked_for():
    whole = document(api_keys=(KEY,))
    assert whole["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    operations = {path: next(iter(ops.values())) for path, ops in whole["paths"].items()}
    opened = {path for path, operation in operations.items() if "security" not in operation}
    assert opened == {"/health", "/ping", "/metrics", *PAGE_PATHS}
    assert "401" in operations["/v1/models"]["responses"]
    assert "401" not in operations["/health"]["responses"]
    assert "securitySchemes" not in document()["components"]


def test_every_schema_is_one_and_every_reference_leads_somewhere():
    whole = document()
    for schema in whole["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(whole)))
    assert references <= set(whole["components"]["schemas"])
    assert references >= {"CompletionRequest", "ChatCompletionAnswer", "ErrorAnswer"}


BODIES = [
    (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 1, "echo": False, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2, "return_prompt_text": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_fit_their_schema(path, body):
    whole = document()
    answer = ok(path, body)
    schema = success(whole, path)["application/json"]["schema"]
    check(answer, schema, whole)
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        check({**answer, "surprise": 1}, schema, whole)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_events_fit_their_schema(path, body):
    whole = document()
    item = success(whole, path)["text/event-stream"]["itemSchema"]
    done, data = item["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for event in stream(path, {**body, "stream_options": options}):
        check(event, data["contentSchema"], whole)
        with pytest.raises(jsonschema.ValidationError, match="not valid"):
            check({**event, "surprise": 1}, data["contentSchema"], whole)


def test_requests_of_the_tests_fit_their_schema_and_wrong_ones_do_not():
    whole = document()
    schema = whole["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check(BODIES[-1][1], schema, whole)
    with pytest.raises(jsonschema.ValidationError, match="messages"):
        check({"prompt": "a"}, schema, whole)


@pytest.mark.parametrize(
    "value", [True, False, 0, 1, "0", "1", "true", "FALSE", None, 2, "yes", []]
)
@pytest.mark.parametrize("name", ["echo", "stream_options"])
def test_flags_are_described_as_they_are_taken(name, value):
    whole = document()
    schema = whole["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = {"stream": True, "stream_options": {"include_usage": value}}
    body = BODIES[-1][1] | (fields if name == "stream_options" else {name: value})

    async def status(client: Client) -> int:
        async with client.post(CHAT, json=body) as response:
            return response.status

    is_described = jsonschema.Draft202012Validator({**schema, **whole}).is_valid(body)
    assert is_described == (with_server(status) == 200)
