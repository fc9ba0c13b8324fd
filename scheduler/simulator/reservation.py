"""What serving was before blocks: each request reserves contiguous memory for its whole life.

A comparison, not a scheduler: one row per running request, one token per step, and only the steps
in which somebody waits are counted. Strategies and breakdown are those of figure 2 of
PagedAttention, arXiv:2309.06180.
"""

import heapq
from dataclasses import dataclass
from itertools import count

from paged.scheduler.simulator.trace import Trace, TraceRequest

STRATEGIES = ("max", "pow2", "oracle")
"""Reserve the longest possible request (FasterTransformer, Orca); the next power of two of the
output; exactly what will be used, which nobody can know."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Mean shares of the KV memory, by step, while requests wait; they add up to 1.

    Attributes:
      strategy: how memory was given out.
      live: holds keys and values of some token.
      future: reserved, and will hold a token before the request ends.
      internal: reserved, and never will.
      external: not reserved, though requests wait: too small or torn pieces.
      mean_running: requests running at once.
    """

    strategy: str
    live: float
    future: float
    internal: float
    external: float
    mean_running: float

    @property
    def live_of_reserved(self) -> float:
        """Share of the reserved memory that holds tokens."""
        reserved = self.live + self.future + self.internal
        return self.live / reserved if reserved else 0.0


def simulate_reservation(
    trace: Trace, strategy: str, *, num_slots: int, max_model_len: int
) -> MemoryUse:
    """Serve a trace with contiguous reservations and return how the memory was used.

    Args:
      trace: arrival times and contents do not matter.
      strategy: one of `STRATEGIES`.
      num_slots: tokens that the memory holds.
      max_model_len: longest prompt plus output; "max" reserves that.

    Raises: ValueError for an unknown strategy, or a request that can never fit.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(STRATEGIES)}.")
    allocator = BuddyAllocator(num_slots)
    # (step after its last, address, slots reserved, final length) of each request
    running: list[tuple[int, int, int, int]] = []
    live = reserved = final = step = 0
    sums = [0, 0, 0, 0]
    incoming = iter(trace)
    waiting = next(incoming, None)
    for step in count():
        while running and running[0][0] == step:
            _, address, needed, length = heapq.heappop(running)
            allocator.free(address, needed)
            live, final, reserved = live - length, final - length, reserved - needed
        while waiting is not None:
            length = waiting.prompt_tokens + waiting.output_tokens
            needed = _reservation(waiting, strategy, max_model_len)
            place = allocator.allocate(needed)
            if place is None:
                break
            heapq.heappush(running, (step + waiting.output_tokens, place, needed, length))
            live, final, reserved = live + waiting.prompt_tokens, final + length, reserved + needed
            waiting = next(incoming, None)
        if waiting is None:
            break
        if not running:
            raise ValueError(
                f"a request that reserves {_reservation(waiting, strategy, max_model_len)} slots "
                f"does not fit into num_slots={num_slots}; give more memory."
            )
        for index, value in enumerate((live, final - live, reserved - final, len(running))):
            sums[index] += value
        live += len(running)
    steps = max(step, 1)
    held, future, internal = (value / steps / num_slots for value in sums[:3])
    external = 1 - held - future - internal
    return MemoryUse(strategy, held, future, internal, external, sums[3] / steps)


def _reservation(request: TraceRequest, strategy: str, max_model_len: int) -> int:
    prompt, output = request.prompt_tokens, request.output_tokens
    if strategy == "max":
        return max(max_model_len, prompt + output)
    if strategy == "pow2":
        return prompt + (1 << (output - 1).bit_length())
    return prompt + output


class BuddyAllocator:
    """Hands out contiguous pieces: powers of two that are split and merged (mutable).

    Args:
      num_slots: size of the memory; what is no power of two is several pieces.

    Source: Knowlton, A fast storage allocator, 1965; Orca (OSDI 2022) is taken to use it, as in
    PagedAttention, section 6.1.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}
        address = 0
        for order in range(num_slots.bit_length() - 1, -1, -1):
            self._free[order] = set()
            if num_slots >> order & 1:
                self._free[order].add(address)
                address += 1 << order

    def allocate(self, size: int) -> int | None:
        """Return the address of a free piece of at least `size` slots, None if there is none."""
        wanted = (size - 1).bit_length()
        order = wanted
        while order in self._free and not self._free[order]:
            order += 1
        if order not in self._free:
            return None
        address = min(self._free[order])
        self._free[order].remove(address)
        while order > wanted:
            order -= 1
            self._free[order].add(address + (1 << order))
        return address

    def free(self, address: int, size: int) -> None:
        """Give a piece back, of the size it was asked for."""
        order = (size - 1).bit_length()
        while (buddy := address ^ (1 << order)) in self._free.get(order, ()):
            self._free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        self._free[order].add(address)
