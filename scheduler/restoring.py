"""`Restorer`: requests whose prefixes come back from memory below the device.

A prefix that left the device costs a copy instead of a prefill. The request waits for the copy
with its blocks in hand, and everybody else goes on (docs/decisions/0014).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.kv_manager import KVManager, PrefixHit
from paged.scheduler.request import Request, RequestStatus


class LoadResult(Protocol):
    """One finished load: how many leading blocks are good, and what has to be written."""

    @property
    def request_id(self) -> str:
        """Whose load it was."""

    @property
    def num_blocks_ok(self) -> int:
        """How many leading blocks have arrived intact."""

    @property
    def payload(self) -> Any:
        """What the runner writes into the blocks; None if nothing arrived."""


class Tiers(Protocol):
    """What the scheduler needs of the tiers; `paged.scheduler.tiers.manager` has the real ones."""

    def on_evict(self, block_id: int, key: bytes) -> None:
        """Note that a cached block is about to be overwritten."""

    def lookup(self, keys: Sequence[bytes]) -> Sequence[str]:
        """Return the media of the leading run of keys that some tier has."""

    def start_load(self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin to bring blocks back."""

    def take_finished(self) -> Sequence[LoadResult]:
        """Return the loads that have ended since the last call, well or not."""

    def cancel(self, request_id: str) -> None:
        """Forget a load."""

    def take_saves(self) -> Sequence[tuple[int, bytes]]:
        """Return the evicted blocks to be read before the next step."""

    def clear(self, namespace: str | None = None) -> None:
        """Forget all content; what follows is stored under another name where that outlives us."""


@dataclass(slots=True)
class _Loading:
    request: Request
    media: Sequence[str]


class Restorer:
    """Starts and collects the loads of waiting requests (mutable).

    Args:
      kv: block tables of the requests.
      pool: the device's blocks; its evictions are handed to the tiers.
      tiers: the memory below; None turns everything here off.
    """

    def __init__(self, kv: KVManager, pool: BlockPool, tiers: Tiers | None) -> None:
        self._kv = kv
        self._pool = pool
        self._tiers = tiers
        self._loading: dict[str, _Loading] = {}
        self._media: dict[str, dict[str, int]] = {}
        if tiers is not None:
            if kv.num_groups > 1:
                raise ValueError(
                    "KV tiers do not take models that mix full and sliding-window layers; turn "
                    "kv_offloading_size off, or set disable_hybrid_kv_cache_manager."
                )
            pool.on_evict = tiers.on_evict

    @property
    def num_loading(self) -> int:
        """Requests that wait for a load."""
        return len(self._loading)

    def start(self, request: Request, hit: PrefixHit) -> bool:
        """Begin to restore what follows the device's hit; return False if there is nothing.

        On success the request holds its cached blocks and those that are being filled.
        """
        if self._tiers is None or not self._pool.enable_caching or request.needs_whole_prompt:
            return False
        media = self._lookup(request, hit.num_blocks)
        num_tokens = len(media) * self._pool.block_size
        if not media or not self._kv.admit(request, num_tokens, hit, publish=False):
            return False
        request.status = RequestStatus.LOADING
        self._load(request, hit.num_blocks, media)
        return True

    def collect(self) -> tuple[list[Request], list[object]]:
        """Return the requests whose loads have ended, and what to write into blocks.

        Their blocks are findable from now on: the writes come before anything that reads. A load
        that failed in part leaves the rest of the prefix to be computed. One that brought all it
        was asked for is followed by the next, as one load takes only so much.
        """
        assert self._tiers is not None
        requests: list[Request] = []
        payloads: list[object] = []
        for result in self._tiers.take_finished():
            loading = self._loading.pop(result.request_id, None)
            if loading is None:
                continue  # sent back or ended meanwhile
            request, num_ok = loading.request, result.num_blocks_ok
            request.num_computed_tokens += num_ok * self._pool.block_size
            self._kv.publish(request, request.num_computed_tokens)
            if num_ok:
                payloads.append(result.payload)
            self._count(request, loading.media[:num_ok])
            if num_ok < len(loading.media) or not self._go_on(request):
                request.status = RequestStatus.WAITING
                requests.append(request)
        return requests, payloads

    def _go_on(self, request: Request) -> bool:
        """Begin to restore what follows a load that has ended; return False if there is nothing."""
        num_blocks = request.num_computed_tokens // self._pool.block_size
        media = self._lookup(request, num_blocks)
        num_tokens = len(media) * self._pool.block_size
        if not media or not self._kv.extend(request, num_tokens, publish=False):
            return False
        self._load(request, num_blocks, media)
        return True

    def _lookup(self, request: Request, start: int) -> Sequence[str]:
        """Return the media of the request's blocks from `start` on that one load can bring."""
        assert self._tiers is not None
        limit = (request.num_tokens - 1) // self._pool.block_size
        keys = request.block_hashes[start:limit]
        return self._tiers.lookup(keys) if keys else ()

    def _load(self, request: Request, start: int, media: Sequence[str]) -> None:
        assert self._tiers is not None
        stop = start + len(media)
        self._loading[request.request_id] = _Loading(request, media)
        self._tiers.start_load(
            request.request_id, request.block_hashes[start:stop], request.block_ids[start:stop]
        )

    def _count(self, request: Request, media: Sequence[str]) -> None:
        if request.num_cached_tokens >= 0:
            return  # after a preemption it gets its own work back
        counts = self._media.setdefault(request.request_id, {})
        for medium in media:
            counts[medium] = counts.get(medium, 0) + self._pool.block_size

    def take_media(self, request: Request) -> Mapping[str, int] | None:
        """Return tokens by medium that a request got from below; None if there are no tiers."""
        if self._tiers is None:
            return None
        return self._media.pop(request.request_id, {})

    def cancel(self, request: Request) -> bool:
        """Forget what a request has been restored, and its load; say whether one was on its way.

        Its blocks are still its own.
        """
        self._media.pop(request.request_id, None)
        if self._loading.pop(request.request_id, None) is None:
            return False
        assert self._tiers is not None
        self._tiers.cancel(request.request_id)
        return True

    def cancel_last(self) -> Request:
        """Forget the load that was started last and return its request, which waits again."""
        request = next(reversed(self._loading.values())).request
        self.cancel(request)
        request.status = RequestStatus.WAITING
        return request

    def take_saves(self) -> Sequence[tuple[int, bytes]]:
        """Return the evicted blocks to be read before the step that is being planned."""
        return () if self._tiers is None else self._tiers.take_saves()

    def clear(self, namespace: str | None = None) -> None:
        """Forget what the tiers hold; `namespace` names what new weights will compute."""
        if self._tiers is not None:
            self._tiers.clear(namespace)
