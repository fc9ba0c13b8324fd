"""`LoRASlots`: which adapter lies in which slot of the device, and who waits for one."""

from collections import Counter, OrderedDict

from paged.scheduler.lora_store import Adapter
from paged.scheduler.request import Request


class LoRASlots:
    """Gives slots to the adapters of admitted requests, least recently used out first (mutable).

    Requests of equal adapters share a slot. One that nobody uses keeps its adapter until another
    needs the room.

    Args:
      num_slots: slots beside slot 0, which is the base model's; 0: requests have no adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, last used last
        self._users: Counter[str] = Counter()  # admitted requests by digest
        self._waiting: Counter[str] = Counter()  # others by digest
        self._running_names: Counter[str] = Counter()
        self._waiting_names: Counter[str] = Counter()
        self._loads: list[tuple[int, Adapter]] = []

    @property
    def running_names(self) -> tuple[str, ...]:
        """Names of the adapters of admitted requests, sorted."""
        return tuple(sorted(self._running_names))

    @property
    def waiting_names(self) -> tuple[str, ...]:
        """Names of the adapters of waiting requests, sorted."""
        return tuple(sorted(self._waiting_names))

    @property
    def num_blocked(self) -> int:
        """Waiting requests that `can_admit` refuses."""
        return sum(n for digest, n in self._waiting.items() if not self._has_room(digest))

    def register(self, request: Request) -> None:
        """Take in a new request, which waits."""
        self._count(self._waiting, self._waiting_names, request, 1)

    def forget(self, request: Request) -> None:
        """Take out a request that has ended; it has a slot no more, or never had."""
        self._count(self._waiting, self._waiting_names, request, -1)

    def can_admit(self, request: Request) -> bool:
        """Say whether the request's adapter has a slot, or one can be made free."""
        return request.adapter is None or self._has_room(request.adapter.digest)

    def acquire(self, request: Request) -> None:
        """Give an admitted request its slot; does nothing if it has it. Ask `can_admit` first."""
        adapter = request.adapter
        if adapter is None or request.lora_slot:
            return
        slot = self._slots.get(adapter.digest)
        if slot is None:
            slot = self._free.pop() if self._free else self._take_unused()
            self._slots[adapter.digest] = slot
            self._loads.append((slot, adapter))
        self._slots.move_to_end(adapter.digest)
        request.lora_slot = slot
        self._count(self._waiting, self._waiting_names, request, -1)
        self._count(self._users, self._running_names, request, 1)

    def release(self, request: Request) -> None:
        """Take back the slot of a request that gives up its blocks, and waits; it may have none."""
        if request.lora_slot:
            request.lora_slot = 0
            self._count(self._users, self._running_names, request, -1)
            self._count(self._waiting, self._waiting_names, request, 1)

    def take_loads(self) -> tuple[tuple[int, Adapter], ...]:
        """Return the adapters that have to be in their slots before the next step, in order."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def _has_room(self, digest: str) -> bool:
        return digest in self._slots or bool(self._free) or len(self._users) < len(self._slots)

    def _take_unused(self) -> int:
        digest = next(digest for digest in self._slots if digest not in self._users)
        return self._slots.pop(digest)

    def _count(
        self, digests: Counter[str], names: Counter[str], request: Request, change: int
    ) -> None:
        if request.adapter is None:
            return
        for counter, key in ((digests, request.adapter.digest), (names, request.adapter.name)):
            counter[key] += change
            if not counter[key]:
                del counter[key]
