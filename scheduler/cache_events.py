"""What happens to the content of KV blocks, told to whoever subscribed; sends nothing anywhere.

Routers and tiers follow a cache by these events. A content is named by its hash, not by its block:
it is stored once some block holds it and removed once no block of that medium does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paged.scheduler.prefix_cache import ExtraKeys


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence can now be found.

    Attributes:
      block_hashes: hashes of the blocks, in order.
      parent_block_hash: hash of the block before the first; None at the start of a sequence.
      token_ids: their tokens, `block_size` per block.
      block_size: tokens per block.
      lora_name: the adapter they were computed with.
      extra_keys: per block, what else its content depends on.
      group: index of the KV cache group.
      medium: where they lie; "device": what goes further down is counted and not announced.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] | None = None
    group: int = 0
    medium: str = "device"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These contents are no longer in the medium; a tier below it may have them."""

    block_hashes: tuple[bytes, ...]
    group: int = 0
    medium: str = "device"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset."""


type CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """Hands each event to every subscriber, in order of subscription (mutable).

    Subscribers run on the thread that changes the cache, inside `schedule`: a slow one belongs
    behind a queue. Whoever emits asks `is_active` first and so builds no event for nobody.

    Source: vLLM `distributed/kv_events.py`.
    """

    __slots__ = ("_callbacks", "is_active")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[CacheEvent], None]] = []
        self.is_active = False

    def subscribe(self, callback: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `callback` with every event from now on; the result ends that, once or often."""

        # A closure of its own, so that a callback may be subscribed twice and removed once.
        def deliver(event: CacheEvent) -> None:
            callback(event)

        def unsubscribe() -> None:
            if deliver in self._callbacks:
                self._callbacks.remove(deliver)
                self.is_active = bool(self._callbacks)

        self._callbacks.append(deliver)
        self.is_active = True
        return unsubscribe

    def emit(self, event: CacheEvent) -> None:
        """Hand the event to all subscribers."""
        for callback in tuple(self._callbacks):
            callback(event)
