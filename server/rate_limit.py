"""Requests per minute of each API key."""

import math
import time
from collections.abc import Callable, Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from paged.server.auth import TENANT
from paged.server.errors import ApiError
from paged.server.reply_headers import REPLY_HEADERS


class TokenBuckets:
    """A bucket of requests for each name, refilled evenly over a minute (mutable).

    Args:
      per_minute: requests that a full bucket holds, and that come back in a minute.
      clock: monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._capacity = float(per_minute)
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}  # requests left, when

    def take(self, name: str) -> tuple[int, float]:
        """Take a request out of a bucket.

        Returns: how many are left, and the seconds until there is one, which are above 0 if none
          could be taken.
        """
        now = self._clock()
        level, then = self._levels.get(name, (self._capacity, now))
        level = min(self._capacity, level + (now - then) * self._per_second)
        if level < 1:
            self._levels[name] = level, now
            return 0, (1 - level) / self._per_second
        self._levels[name] = level - 1, now
        return int(level - 1), 0.0


def rate_limit_middleware(
    per_minute: int | None,
    open_paths: Collection[str],
    clock: Callable[[], float] = time.monotonic,
) -> Middleware:
    """Return the middleware that limits the POST requests of each key; None limits nothing.

    Comes after the one that asks for the key; without keys all clients share one bucket.

    Args:
      per_minute: of each key.
      open_paths: ask for no key and count for none: a probe that is refused is a restart.
      clock: monotonic seconds.
    """
    buckets = None if per_minute is None else TokenBuckets(per_minute, clock)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.rel_url.raw_path in open_paths
        if buckets is None or request.method != "POST" or is_open:
            return await handler(request)
        left, wait_seconds = buckets.take(request.get(TENANT, ""))
        request[REPLY_HEADERS].update(
            {
                "x-ratelimit-limit-requests": str(per_minute),
                "x-ratelimit-remaining-requests": str(left),
            }
        )
        if wait_seconds:
            raise ApiError(
                f"This key may send {per_minute} requests per minute; try again in "
                f"{wait_seconds:.1f} s.",
                status=429,
                headers={"Retry-After": str(math.ceil(wait_seconds))},
            )
        return await handler(request)

    return middleware
