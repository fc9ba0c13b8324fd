"""What the tiers need of a device; the real one is `transfer.py`, tests bring one of their own."""

from collections.abc import Callable, Sequence
from typing import Protocol

from paged.scheduler.tiers.host_blocks import HostBlocks

type Submit = Callable[[Sequence[bytes], object | None], None]
"""Takes the keys of gathered blocks, and the device's handle of them (None: it failed)."""


class DeviceSide(Protocol):
    """Moves blocks between a device and the host; knows no key's meaning and no request."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def connect(self, submit: Submit) -> None:
        """Say where gathered blocks go."""
        ...

    def fetch(self, gathered: object) -> HostBlocks:
        """Wait for gathered blocks and bring them to the host; called on the save thread."""
        ...

    def allocate(self, num_blocks: int) -> HostBlocks:
        """Return host memory for blocks on their way up; called on the load thread."""
        ...

    def stage(self, blocks: HostBlocks, block_ids: Sequence[int]) -> object:
        """Bring the first `len(block_ids)` blocks to the device; called on the load thread.

        Returns: what `restore` of the device writes into these blocks of the cache, ready.
        """
        ...
