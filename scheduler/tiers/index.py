"""`LruIndex`: which blocks a tier holds, in the order in which it would give them up."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

WRITING = -1
"""Reference count of a block whose bytes are not complete yet: neither found nor evicted."""


@dataclass(slots=True, eq=False)
class Entry:
    """One block of a tier (mutable).

    Attributes:
      key: name of the content.
      num_bytes: what it takes.
      slot: where it lies, if the tier has slots.
      ref_count: `WRITING`, 0 (ready, may be evicted) or the number of its readers (pinned).
    """

    key: bytes
    num_bytes: int
    slot: int = 0
    ref_count: int = 0


class LruIndex:
    """Entries by key, least recently used first; not thread-safe.

    Source: vLLM `v1/kv_offload`, its LRU manager and the meaning of its reference counts.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is there and complete."""
        entry = self._entries.get(key)
        return entry is not None and entry.ref_count != WRITING

    def get(self, key: bytes) -> Entry | None:
        """Return the entry, complete or not."""
        return self._entries.get(key)

    def keys(self) -> list[bytes]:
        """Return all keys, least recently used first."""
        return list(self._entries)

    def entries(self) -> list[Entry]:
        """Return all entries, least recently used first."""
        return list(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Add an entry that is not there yet as the most recently used."""
        assert entry.key not in self._entries
        self._entries[entry.key] = entry
        self.num_bytes += entry.num_bytes

    def remove(self, entry: Entry) -> None:
        """Forget an entry; does nothing if it is not, or no longer, there."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self.num_bytes -= entry.num_bytes

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these blocks of one prefix the most recently used, its head the very last to go.

        A block without its head can never be hit, so recency runs from tail to head. Unknown
        keys are ignored.
        """
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def victim(self) -> Entry | None:
        """Return the least recently used entry that nobody reads or writes."""
        return next((e for e in self._entries.values() if e.ref_count == 0), None)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.num_bytes = 0
