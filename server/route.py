"""`Route`: one path and method, its handler, and what comes in and goes out."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the path or the query.

    Attributes:
      name: as in the path, or the query.
      place: "path" or "query".
      schema: JSON Schema of its text.
      description: for readers.
    """

    name: str
    place: str
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One row of the table that the application and `/openapi.json` are made from.

    Attributes:
      method: such as "POST".
      path: in aiohttp's spelling, which may hold patterns: `/v1/models/{model:.+}`.
      handler: answers it.
      summary: one sentence.
      tag: heading that it stands under.
      body: struct, or union of structs, of the JSON body; None if there is none.
      answer: struct of the JSON of a success; None if `media` says what else it is.
      events: struct, or union of structs, of the events if the request may ask for a stream.
      media: media type of a success; None is an empty body.
      parameters: of path and query.
      errors: statuses of its errors.
      needs_key: it is closed to who has no API key, where keys are set.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    body: Any = None
    answer: Any = None
    events: Any = None
    media: str | None = JSON
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    needs_key: bool = True

    def definition(self) -> web.RouteDef:
        """Return it as the router takes it."""
        return web.route(self.method, self.path, self.handler)
