"""`ResponseStore`: finished responses in memory, for /v1/responses/{id} and their successors."""

from collections import OrderedDict
from dataclasses import dataclass

from paged.server.errors import ApiError
from paged.server.protocol import ChatMessage
from paged.server.response_answers import ResponseAnswer


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends.

    Attributes:
      answer: as it was sent.
      messages: what was said before it and in it, without instructions.
      num_bytes: about what it adds to the store.
    """

    answer: ResponseAnswer
    messages: tuple[ChatMessage, ...]
    num_bytes: int


class ResponseStore:
    """Responses of all tenants, which see only their own; the least recently used go first.

    Args:
      max_responses: most that are kept.
      max_bytes: most that their texts take together.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    @property
    def is_enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, instead of an earlier state of it; not if it exceeds the whole store."""
        earlier = self._stored.pop((tenant, stored.answer.id), None)
        if earlier is not None:
            self._num_bytes -= earlier.num_bytes
        if stored.num_bytes > self._max_bytes:
            return
        self._stored[tenant, stored.answer.id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Return a response.

        Raises: ApiError (404) if it is not there, any more or at all.
        """
        stored = self._stored.get((tenant, response_id))
        if stored is None:
            raise ApiError(
                f"There is no response {response_id[:80]!r}: it was never stored, was deleted, or "
                f"had to make room; the last {self._max_responses} are kept, until the server "
                "stops. Send the whole conversation as input instead.",
                status=404,
                param=param,
            )
        self._stored.move_to_end((tenant, response_id))
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response.

        Raises: ApiError (404) if it is not there.
        """
        stored = self.get(tenant, response_id)
        self._num_bytes -= stored.num_bytes
        del self._stored[tenant, response_id]
