"""How the engine handles a request: its priority, and what it shares with and leaves to others."""

import re
from dataclasses import dataclass

from aiohttp import web

from paged.scheduler.admission import parse_cache_mode
from paged.scheduler.request import CacheMode
from paged.server.auth import TENANT
from paged.server.context import CONTEXT
from paged.server.errors import ApiError
from paged.server.protocol import INT64_MAX, INT64_MIN, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What the engine is told about a request beside its prompts and sampling parameters.

    Attributes:
      cache_salt: requests share cached prefixes only under an equal salt.
      cache_mode: what the request leaves behind in the prefix cache.
      priority: lower is more urgent.
    """

    cache_salt: str | None
    cache_mode: CacheMode
    priority: int


def handling_of(http_request: web.Request, request: GenerationRequest) -> Handling:
    """Return how a request is to be handled, as its body, its headers and its API key say.

    Raises: ApiError or ParameterError naming "cache_salt" or "cache".
    """
    return Handling(
        cache_salt=_effective_salt(http_request, request.cache_salt),
        cache_mode=parse_cache_mode(request.cache),
        priority=_priority(http_request, request),
    )


def _effective_salt(http_request: web.Request, salt: str | None) -> str | None:
    """Return the body's salt, behind the tenant's own where there are several tenants."""
    # Refused where another layer could take them for a path or a user name.
    if salt is not None and (len(salt) > 128 or any(c in salt for c in "@/\\\0")):
        raise ApiError(
            "cache_salt must have 1 to 128 characters, none of them '@', '/', '\\' or NUL.",
            param="cache_salt",
        )
    if not http_request.app[CONTEXT].settings.salts_by_key:
        return salt
    # The tenant's part has a fixed length: no salt of a body reaches into another tenant's.
    return f"{http_request[TENANT]}/{salt or ''}"


def _priority(http_request: web.Request, request: GenerationRequest) -> int:
    """Return the priority of the header X-Vllm-Priority, else the body's, else 0."""
    header = http_request.headers.get("X-Vllm-Priority", "").strip()
    # Whatever else it is, the reference ignores it. Not int(): it takes "1_0" and other digits.
    if re.fullmatch(r"[+-]?[0-9]{1,19}", header) and INT64_MIN <= int(header) <= INT64_MAX:
        return int(header)
    return request.priority or 0
