"""Figures of the tiers that are more than one number: transfers by size, delays by length."""

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

LOOKUP_SECONDS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
"""Upper bounds of the lengths that look-ups are counted by."""


@dataclass(slots=True)
class Transfers:
    """Blocks that moved one way (mutable; guarded by who has it).

    Attributes:
      num_bytes, seconds: of all transfers together.
      by_blocks: how many transfers there were of so many blocks.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    by_blocks: Counter[int] = field(default_factory=Counter)

    def add(self, num_blocks: int, block_bytes: int, seconds: float) -> None:
        """Count one transfer."""
        self.num_bytes += num_blocks * block_bytes
        self.seconds += seconds
        self.by_blocks[num_blocks] += 1

    def copy(self) -> "Transfers":
        """Return the figures as they are now."""
        return Transfers(self.num_bytes, self.seconds, self.by_blocks.copy())


@dataclass(slots=True)
class Delays:
    """How often something took how long (mutable; guarded by who has it).

    Attributes:
      seconds: of all together.
      counts: of those up to each of `LOOKUP_SECONDS`, and above the bound before it; then the rest.
    """

    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(LOOKUP_SECONDS) + 1))

    def add(self, seconds: float) -> None:
        """Count one."""
        self.seconds += seconds
        self.counts[bisect.bisect_left(LOOKUP_SECONDS, seconds)] += 1

    def copy(self) -> "Delays":
        """Return the figures as they are now."""
        return Delays(self.seconds, self.counts.copy())


@dataclass(frozen=True, slots=True)
class MediumStats:
    """Figures of one tier.

    Attributes:
      num_blocks, num_bytes, capacity_bytes: what it holds, and may hold.
      num_hits: blocks that loads have brought up from it.
      num_stores: blocks written to it.
      num_failures: file operations that went wrong.
      num_reading, num_writing: blocks that somebody reads, or writes, now.
      num_queries, num_found: blocks that it was asked for, and had. A request that waits asks again
        in every step.
      reads, writes: its transfers, one for each block; of the disk only.
      num_failed_reads, num_failed_writes: of the failures.
    """

    num_blocks: int
    num_bytes: int
    capacity_bytes: int
    num_hits: int
    num_stores: int
    num_failures: int
    num_reading: int = 0
    num_writing: int = 0
    num_queries: int = 0
    num_found: int = 0
    reads: Transfers = field(default_factory=Transfers)
    writes: Transfers = field(default_factory=Transfers)
    num_failed_reads: int = 0
    num_failed_writes: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of all tiers; counters never go down.

    Attributes:
      block_bytes: of one block.
      media: by medium ("host", "disk"), for those there are.
      num_saving: evicted blocks on their way down.
      num_loading: loads not taken yet.
      num_saves_dropped: evicted blocks not saved because too many were on their way.
      num_saves_failed: evicted blocks not saved for another reason.
      num_load_blocks_failed: blocks that a load was to bring up and could not.
      num_loads_cancelled: loads.
      load_stages: of the loads not taken yet, how many wait to start, are under way, and are done.
      loads, saves: transfers to the device and from it. The time of a load is that of reading its
        blocks, from the disk, too, and handing them to the device; the time of a save that of
        waiting for the device's copy.
      lookups: how long the engine was held up by look-ups.
    """

    block_bytes: int
    media: Mapping[str, MediumStats]
    num_saving: int
    num_loading: int
    num_saves_dropped: int
    num_saves_failed: int
    num_load_blocks_failed: int
    num_loads_cancelled: int
    load_stages: tuple[int, int, int] = (0, 0, 0)
    loads: Transfers = field(default_factory=Transfers)
    saves: Transfers = field(default_factory=Transfers)
    lookups: Delays = field(default_factory=Delays)
