"""`TierStack`: host memory above the disk, either of which may be missing, as one store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.host_blocks import HostBlocks
from paged.scheduler.tiers.index import Entry

type Medium = Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class Pin:
    """A block that stays where it is until it is unpinned."""

    medium: Medium
    entry: Entry


class TierStack:
    """Stores at the top, finds wherever it is (thread-safe as its tiers are).

    What the host gives up goes to the disk. A block is looked for from the top down: on its way
    down it is in both for a while, never in neither.

    `store` belongs to one thread, `read` to one other.

    Raises: ValueError if there is no tier, or the tiers disagree about the size of a block.
    """

    def __init__(self, host: HostTier | None, disk: DiskTier | None) -> None:
        tiers = [tier for tier in (host, disk) if tier is not None]
        if not tiers:
            raise ValueError("host and disk are both None; give at least one tier.")
        self.block_bytes = tiers[0].block_bytes
        if tiers[-1].block_bytes != self.block_bytes:
            raise ValueError(
                f"host holds blocks of {self.block_bytes} bytes and disk of "
                f"{tiers[-1].block_bytes}; make them for the same cache."
            )
        self.host = host
        self.disk = disk
        self._written = np.empty(self.block_bytes, np.uint8)
        self._read = np.empty(self.block_bytes, np.uint8)
        if host is not None and disk is not None:
            host.spill = disk.store

    @property
    def media(self) -> list[Medium]:
        """The tiers there are, fastest first."""
        tiers: list[tuple[Medium, object]] = [("host", self.host), ("disk", self.disk)]
        return [medium for medium, tier in tiers if tier is not None]

    @property
    def top(self) -> Medium:
        """The fastest tier, where blocks from the device go."""
        return self.media[0]

    def medium_of(self, key: bytes) -> Medium | None:
        """Return the fastest tier that has the block, None if none has."""
        if self.host is not None and key in self.host:
            return "host"
        if self.disk is not None and key in self.disk:
            return "disk"
        return None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these blocks of one prefix, in its order, the most recently used."""
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.touch(keys)

    def pin(self, key: bytes) -> Pin | None:
        """Keep a block where it is until `unpin`; None if no tier has it."""
        if self.host is not None and (entry := self.host.pin(key)) is not None:
            return Pin("host", entry)
        if self.disk is not None and (entry := self.disk.pin(key)) is not None:
            return Pin("disk", entry)
        return None

    def unpin(self, pin: Pin) -> None:
        """Release a pinned block."""
        tier = self.host if pin.medium == "host" else self.disk
        assert tier is not None
        tier.unpin(pin.entry)

    def store(self, key: bytes, blocks: HostBlocks, index: int) -> bool:
        """Take in block `index` of `blocks`; return whether it is there."""
        if self.host is not None and self.host.store(key, lambda row: blocks.copy_out(index, row)):
            return True
        # No host memory, or all of it is being read.
        if self.disk is None:
            return False
        blocks.copy_out(index, self._written)
        return self.disk.store(key, self._written)

    def read(self, pin: Pin, blocks: HostBlocks, index: int) -> bool:
        """Copy a pinned block to place `index` of `blocks`; return whether that worked."""
        if pin.medium == "host":
            assert self.host is not None
            blocks.copy_in(index, self.host.read(pin.entry))
            return True
        assert self.disk is not None
        if not self.disk.load(pin.entry, self._read):
            return False
        blocks.copy_in(index, self._read)
        return True

    def clear(self, namespace: str | None = None) -> None:
        """Forget every block; later ones belong to `namespace` (None: as before)."""
        if self.host is not None:
            self.host.clear()
        if self.disk is not None:
            self.disk.clear(namespace)
