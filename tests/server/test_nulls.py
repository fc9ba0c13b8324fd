"""Null means "not sent" in every field that may be left out, at every depth, as described.

The fields are read off the structs, so a new one is tested by being there.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from msgspec import inspect

from paged.server.openapi import _members
from paged.server.protocol import TokenizeChatRequest
from paged.server.routes import make_routes
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Client, with_server

SETTINGS = {"dev_mode": True, "allow_runtime_lora_updating": True}
ROUTES = [route for route in make_routes(ServerSettings(**SETTINGS)) if route.body is not None]
BODIES: list[tuple[str, type]] = [
    (route.path, kind) for route in ROUTES for kind in _members(route.body)
]
# The least that each body may say.
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
    "/v1/embeddings": {"input": "ab"},
    "/v1/responses": {"input": [{"role": "user", "content": "ab"}]},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
}
CHANGING = ("id", "created", "created_at", "completed_at")


def minimal(path: str, kind: type) -> dict[str, Any]:
    if kind is TokenizeChatRequest:
        return MINIMAL["/v1/chat/completions"]
    return MINIMAL.get(path, {})


def optional(kind: type) -> list[str]:
    return [field.encode_name for field in inspect.type_info(kind).fields if not field.required]


def structs_in(node: Any, seen: set[type]) -> Iterator[type]:
    """Yield all structs that a type leads to."""
    if isinstance(node, inspect.StructType):
        if node.cls in seen:
            return
        seen.add(node.cls)
        yield node.cls
        for field in node.fields:
            yield from structs_in(field.type, seen)
    for name in ("types", "item_types"):
        for inner in getattr(node, name, ()):
            yield from structs_in(inner, seen)
    for name in ("item_type", "value_type"):
        if isinstance(inner := getattr(node, name, None), inspect.Type):
            yield from structs_in(inner, seen)


def all_structs() -> list[type]:
    seen: set[type] = set()
    return [s for _, kind in BODIES for s in structs_in(inspect.type_info(kind), seen)]


@functools.cache
def document() -> dict[str, Any]:
    async def test(client: Client) -> dict[str, Any]:
        async with client.get("/openapi.json") as response:
            return await response.json()

    return with_server(test, **SETTINGS)


@pytest.mark.parametrize("struct", all_structs(), ids=lambda struct: struct.__name__)
def test_every_field_that_may_be_left_out_may_be_null_and_is_described_so(struct):
    assert len(all_structs()) > 12
    (described,), _ = msgspec.json.schema_components(
        [struct], ref_template="#/components/schemas/{name}"
    )
    name = described["$ref"].rpartition("/")[2]
    schemas = document()["components"]["schemas"]
    for field in inspect.type_info(struct).fields:
        if field.required:
            continue
        assert msgspec.convert(None, field_type(struct, field.name)) is None, field.name
        schema = schemas[name]["properties"][field.encode_name]
        rooted = {"components": {"schemas": schemas}, **schema}
        jsonschema.Draft202012Validator(rooted).validate(None)


def field_type(struct: type, name: str) -> Any:
    (field,) = [f for f in msgspec.structs.fields(struct) if f.name == name]
    return field.type


def test_only_bodies_that_need_a_file_are_not_sent():
    assert {path for path, _ in BODIES} - set(MINIMAL) == {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }


@pytest.mark.parametrize(
    ("path", "kind"),
    [(path, kind) for path, kind in BODIES if path in MINIMAL],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_null_gives_the_same_answer_as_nothing(path, kind):
    body = minimal(path, kind)
    names = optional(kind)

    async def answers(client: Client) -> list[Any]:
        nulls = [{name: None} for name in names]
        got = []
        for extra in [{}, *nulls, {name: None for name in names}]:
            async with client.post(path, json={**extra, **body}) as response:
                answer = await response.json()
                assert response.status == 200, (extra, answer)
            got.append({k: v for k, v in answer.items() if k not in CHANGING})
        return got

    engine = FakeEngine()
    first, *others = with_server(answers, engine, **SETTINGS)
    for name, answer in zip([*names, "all"], others, strict=True):
        assert without_ids(answer) == without_ids(first), name
    # What the engine was told is the same, too.
    if engine.seen:
        told = [(seen.prompt_token_ids, seen.params) for seen in engine.seen]
        assert all(one == told[0] for one in told)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k != "id"}
    return [without_ids(v) for v in value] if isinstance(value, list) else value
