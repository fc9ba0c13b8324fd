"""What one request, and all streams together, may ask of the server."""

from collections.abc import Iterator
from contextlib import contextmanager

from paged.scheduler.params import ParameterError
from paged.server.errors import SCHEMA_ERROR, ApiError
from paged.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from paged.server.settings import ServerSettings


def check_limits(settings: ServerSettings, request: GenerationRequest) -> None:
    """Refuse a request that is larger than the server's flags allow.

    Raises: ParameterError, or ApiError, naming the field and the flag.
    """
    if request.n is not None and request.n > settings.max_n:
        raise ParameterError(
            "n", request.n, f"must be at most {settings.max_n} (the server's --max-n)"
        )
    num_stops = len(request.stop) if isinstance(request.stop, list) else 0
    if num_stops > settings.max_stop_strings:
        raise ApiError(
            f"stop must hold at most {settings.max_stop_strings} strings (the server's "
            f"--max-stop-strings), got {num_stops}.",
            type=SCHEMA_ERROR,
            param="body.stop",
        )
    for name, wanted in _wanted_logprobs(request):
        if wanted > settings.max_logprobs:
            raise ParameterError(
                name,
                wanted,
                f"must be at most {settings.max_logprobs} (the server's --max-logprobs)",
            )


def _wanted_logprobs(request: GenerationRequest) -> Iterator[tuple[str, int]]:
    if isinstance(request, CompletionRequest):
        yield "logprobs", request.logprobs or 0
    if isinstance(request, ChatCompletionRequest):
        yield "top_logprobs", request.top_logprobs or 0
    yield "prompt_logprobs", int(request.prompt_logprobs or 0)


class StreamSlots:
    """Counts open streams (mutable).

    Args:
      limit: most of them; None: no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_open = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold one slot.

        Raises: ApiError 429 if all are taken.
        """
        if self._limit is not None and self._num_open >= self._limit:
            raise ApiError(
                f"{self._num_open} streams are open and --max-concurrent-streams is "
                f"{self._limit}; try again later.",
                status=429,
                headers={"Retry-After": "1"},
            )
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
