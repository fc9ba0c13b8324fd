"""GET /openapi.json: the interface described from the table of routes and the structs in it."""

import re
import typing
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from paged._version import __version__
from paged.server.answer_bodies import ErrorAnswer
from paged.server.route import JSON, Parameter, Route

DOCUMENT = web.AppKey("openapi_document", bytes)
"""The document of an application, as it is sent."""

_REFERENCE = "#/components/schemas/{name}"

# What requests may say instead of true and false, as the reference's may (`decode_body`).
_FLAG = {
    "anyOf": [
        {"type": "boolean"},
        {"enum": [0, 1]},
        {"type": "string", "pattern": "^([01]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE])$"},
    ]
}


async def show_document(request: web.Request) -> web.Response:
    """Return the description of all routes, OpenAPI 3.2."""
    return web.Response(body=request.app[DOCUMENT], content_type=JSON)


def openapi_document(routes: Iterable[Route], *, with_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of these routes.

    Args:
      routes: what is served.
      with_keys: API keys are asked for.

    Source: https://spec.openapis.org/oas/v3.2.0.html, 3.2 for the events of streams.
    """
    routes = list(routes)
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schemas, with_keys=with_keys and route.needs_key)
        paths.setdefault(_path(route), {})[route.method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas.components}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.2.0",
        "info": {"title": "paged", "version": __version__},
        "paths": paths,
        "components": components,
    }


class _Schemas:
    """The schemas of all structs that the routes name."""

    def __init__(self, routes: Sequence[Route]) -> None:
        kinds = [
            kind
            for route in routes
            for kind in (route.body, route.answer, route.events)
            if kind is not None
        ]
        kinds.append(ErrorAnswer)
        # Components are structs; a union is spelled out where it is used. msgspec describes no
        # union of structs, because it cannot decode one.
        self._structs = list(dict.fromkeys(struct for kind in kinds for struct in _members(kind)))
        references, self.components = msgspec.json.schema_components(
            self._structs, ref_template=_REFERENCE
        )
        self._references = dict(zip(self._structs, references, strict=True))
        bodies = [struct for route in routes if route.body for struct in _members(route.body)]
        self._widen_flags([self._references[struct] for struct in bodies], set())

    def _widen_flags(self, node: Any, seen: set[str]) -> Any:
        """Return a schema of requests with flags as they may be sent; components are changed."""
        if isinstance(node, list):
            return [self._widen_flags(inner, seen) for inner in node]
        if not isinstance(node, dict):
            return node
        if node.get("type") == "boolean":
            return {**_FLAG, **{name: value for name, value in node.items() if name != "type"}}
        if isinstance(reference := node.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            name = reference.rpartition("/")[2]
            self.components[name] = self._widen_flags(self.components[name], seen)
        return {name: self._widen_flags(value, seen) for name, value in node.items()}

    def of(self, kind: Any) -> dict[str, Any]:
        """Return the schema of a struct, or of a union of structs."""
        references = [self._references[struct] for struct in _members(kind)]
        return references[0] if len(references) == 1 else {"anyOf": references}


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the structs of a union, or the one that it is."""
    kind = getattr(kind, "__value__", kind)  # a name for a union
    return typing.get_args(kind) or (kind,)


def _path(route: Route) -> str:
    """Return the path without aiohttp's patterns."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)


def _operation(route: Route, schemas: _Schemas, *, with_keys: bool) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}_{_path(route)}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [_parameter(parameter) for parameter in route.parameters],
        "responses": _responses(route, schemas, with_keys=with_keys),
    }
    if route.body is not None:
        content = {JSON: {"schema": schemas.of(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    if with_keys:
        operation["security"] = [{"key": []}]
    return operation


def _event(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an event whose data are JSON of this schema, or `[DONE]`."""
    data = {"contentMediaType": JSON, "contentSchema": schema}
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": parameter.schema,
        "description": parameter.description,
    }


def _responses(route: Route, schemas: _Schemas, *, with_keys: bool) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "OK"}
    if route.media is not None:
        schema = {} if route.answer is None else schemas.of(route.answer)
        media = {"schema": schema} if route.media == JSON else {"schema": {"type": "string"}}
        success["content"] = {route.media: media}
    if route.events is not None:
        success["content"]["text/event-stream"] = {"itemSchema": _event(schemas.of(route.events))}
    error = {JSON: {"schema": schemas.of(ErrorAnswer)}}
    statuses = {*route.errors, 500, *([401] if with_keys else [])}
    responses = {"200": success}
    for status in sorted(statuses):
        description = HTTPStatus(status).phrase
        responses[str(status)] = {"description": description, "content": error}
    return responses
