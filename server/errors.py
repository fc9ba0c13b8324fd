"""Errors of the HTTP interface: one middleware turns exceptions into OpenAI's error envelope.

Handlers raise `ApiError` or let the engine's own errors through; what an exception means to a
client (status, type, parameter) is decided in `to_api_error` and nowhere else.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from paged.models.errors import AdapterError
from paged.scheduler.errors import EngineDeadError, QueueFullError, SlowConsumerError
from paged.scheduler.params import ParameterError

logger = logging.getLogger(__name__)

_STATUS_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}

SCHEMA_ERROR = "Bad Request"
"""Type of errors found before a body has become a request; semantic ones are "BadRequestError"."""


class ApiError(Exception):
    """An error with everything a client is told about it.

    Attributes:
      message: what is wrong and what to do about it.
      status: HTTP status, repeated as `code` in the body.
      type: the error's class, by default the one that belongs to the status.
      param: name of the offending request field, if there is one.
      headers: further response headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type or _STATUS_TYPES.get(status, "APIError")
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the envelope `{"error": {message, type, param, code}}`."""
        # Names taken from a URL or header may hold lone surrogates, which JSON cannot carry.
        message = self.message.encode("utf-8", "replace").decode("utf-8")
        error = {"message": message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}


def json_response(body: object, status: int = 200) -> web.Response:
    """Return `body` as a JSON response."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def error_response(error: ApiError) -> web.Response:
    """Return the HTTP response of an error."""
    response = json_response(error.body(), error.status)
    response.headers.update(error.headers)
    return response


def to_api_error(error: Exception) -> ApiError:
    """Return what the client is told about an exception; unknown ones are logged and hidden."""
    match error:
        case ApiError():
            return error
        case ParameterError():
            detail = f" (parameter={error.parameter}, value={_shorten(error.value)})"
            return ApiError(f"{error}{detail}", param=error.parameter)
        case QueueFullError():
            return ApiError(str(error), status=429, headers={"Retry-After": "1"})
        case SlowConsumerError():
            return ApiError(str(error), status=500)
        case EngineDeadError():
            return ApiError(f"The engine cannot serve requests: {error}", status=503)
        case AdapterError():
            return ApiError(f"The adapter cannot be used any more: {error}", status=500)
        case web.HTTPException():
            return _from_http_exception(error)
        case web.RequestPayloadError():
            return ApiError("The request body ended early or is not what its headers announce.")
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError("Internal server error; the server's log has the details.", status=500)


def error_middleware() -> Middleware:
    """Return the middleware that answers every exception with OpenAI's error envelope."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            raise  # the client is gone; aiohttp closes its side quietly
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.status == 404 and isinstance(error, web.HTTPNotFound):
                api_error.message = f"There is no route {request.method} {request.path}."
            return error_response(api_error)

    return middleware


def _from_http_exception(error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"Method {error.method} is not allowed here; use {allowed}."
        return ApiError(message, status=405, headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(
            "The request body is too large; shorten it or raise --client-max-size.", status=413
        )
    return ApiError(error.reason, status=error.status)


def _shorten(value: object, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "..."
