"""A device and a tier below it without numbers: every slot remembers what was computed into it."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paged.scheduler.output import ModelRunnerOutput, SchedulerOutput
from paged.scheduler.request import Request

VOCABULARY = 3

type Content = tuple[int, str | None, tuple[int, ...]]
"""What the keys and values of a token depend on: weights, the salt's tenant, all tokens so far."""


def next_token(prefix: Sequence[int]) -> int:
    """A language model: deterministic, and sensitive to every token."""
    return zlib.crc32(bytes(prefix)) % VOCABULARY


class FakeDevice:
    """KV slots that remember what was written, and sampling that reads them.

    Steps are run when they are dispatched; their samples are the device's until the test hands
    them to the scheduler.
    """

    def __init__(self, num_blocks: int, block_size: int, windows=(None,), tiers=None) -> None:
        self.block_size = block_size
        self.windows = windows
        self.tiers = tiers
        self.weights_epoch = 0
        self._blocks: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._last_tokens: dict[int, int] = {}

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._move_blocks(output)
        # As in the model: the whole batch writes before anything is read.
        written: set[tuple[int, int]] = set()
        known = [self._known_tokens(row) for row in output.scheduled]
        for row, tokens in zip(output.scheduled, known, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                for group in range(len(self.windows)):
                    block_id, offset = self._slot(row.request, group, position)
                    assert block_id, "written into the null block"
                    assert (block_id, offset) not in written, "two rows write one slot"
                    written.add((block_id, offset))
                    content = self._content(row.request, tokens, position + 1)
                    self._blocks[block_id][offset] = content
        sampled = []
        for row, tokens in zip(output.scheduled, known, strict=True):
            self._read(row, tokens)
            token = next_token(tokens) if row.samples else 0
            if row.samples:
                self._last_tokens[row.request.batch_row] = token
            sampled.append(token)
        return ModelRunnerOutput(np.array(sampled, np.int32))

    def content(self, block_id: int) -> Content | None:
        """What a whole block holds; None if it is not filled with consecutive tokens."""
        block = self._blocks[block_id]
        last = block[-1]
        if last is None:
            return None
        epoch, salt, tokens = last
        first = len(tokens) - self.block_size + 1
        expected = [(epoch, salt, tokens[: first + i]) for i in range(self.block_size)]
        return last if block == expected else None

    def _move_blocks(self, output: SchedulerOutput) -> None:
        for payload in output.restores:
            for block_id, content in payload:
                self._blocks[block_id] = list(content)
        for block_id, key in output.saves:
            self.tiers.store(key, list(self._blocks[block_id]))
        read = [list(self._blocks[source]) for source, _ in output.block_copies]
        destinations = [destination for _, destination in output.block_copies]
        assert len(set(destinations)) == len(destinations)
        for destination, content in zip(destinations, read, strict=True):
            self._blocks[destination] = content

    def _known_tokens(self, row) -> tuple[int, ...]:
        """The request's tokens up to the end of the row; the last may be known here only."""
        end = row.start + row.num_tokens
        tokens = row.request.tokens(0, end)
        assert row.input_in_flight == (len(tokens) < end)
        if row.input_in_flight:
            tokens = [*tokens, self._last_tokens[row.request.batch_row]]
        assert len(tokens) == end
        return tuple(tokens)

    def _read(self, row, tokens) -> None:
        """Check everything that the row's queries may attend to."""
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, row.start - window + 1)
            for position in range(first, len(tokens)):
                block_id, offset = self._slot(row.request, group, position)
                expected = self._content(row.request, tokens, position + 1)
                assert self._blocks[block_id][offset] == expected

    def _slot(self, request: Request, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return request.block_tables[group][index], offset

    def _content(self, request: Request, tokens, length: int) -> Content:
        return self.weights_epoch, request.cache_salt, tuple(tokens[:length])


@dataclass
class FakeLoad:
    request_id: str
    num_blocks_ok: int
    payload: list | None
    polls_left: int


@dataclass
class FakeTiers:
    """A host memory of unlimited speed and unreliable timing.

    Attributes:
      capacity: most blocks; the oldest go first.
      delays: polls that the next loads take, in turn.
      losses: blocks that the next loads lose at their end, in turn.
      largest_load: most blocks of a load.
    """

    capacity: int
    delays: list[int]
    losses: list[int]
    largest_load: int
    stored: dict[bytes, list] = field(default_factory=dict)
    saves: list[tuple[int, bytes]] = field(default_factory=list)
    loads: dict[str, FakeLoad] = field(default_factory=dict)
    num_restored: int = 0

    def on_evict(self, block_id: int, key: bytes) -> None:
        if key not in self.stored:
            self.saves.append((block_id, key))

    def take_saves(self):
        saves, self.saves = self.saves, []
        return saves

    def store(self, key: bytes, content: list) -> None:
        assert None not in content, "saved a block that was never filled"
        self.stored[key] = content
        while len(self.stored) > self.capacity:
            del self.stored[next(iter(self.stored))]

    def lookup(self, keys):
        found = []
        for key in keys[: self.largest_load]:
            if key not in self.stored:
                break
            found.append("host")
        return found

    def start_load(self, request_id, keys, block_ids) -> None:
        content = [(block_ids[i], self.stored[key]) for i, key in enumerate(keys)]
        self.delays.append(self.delays.pop(0))
        self.losses.append(self.losses.pop(0))
        num_ok = max(0, len(keys) - self.losses[-1])
        self.loads[request_id] = FakeLoad(
            request_id, num_ok, content[:num_ok] or None, self.delays[-1]
        )

    def take_finished(self):
        finished = []
        for load in list(self.loads.values()):
            load.polls_left -= 1
            if load.polls_left < 0:
                finished.append(self.loads.pop(load.request_id))
                self.num_restored += finished[-1].num_blocks_ok
        return finished

    def cancel(self, request_id) -> None:
        self.loads.pop(request_id, None)

    def clear(self, namespace=None) -> None:
        self.stored.clear()
