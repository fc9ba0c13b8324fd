"""The arena of host memory: what it holds, what it gives up, and what it must not touch."""

import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.scheduler.tiers.host import HostTier
from tests.scheduler.tiers.fakes import BLOCK_BYTES, content, name

KEYS = [name(number) for number in range(8)]


def store(tier: HostTier, *keys: bytes) -> list[bool]:
    return [tier.store(key, lambda row, key=key: np.copyto(row, content(key))) for key in keys]


def read(tier: HostTier, key: bytes) -> bytes | None:
    entry = tier.pin(key)
    if entry is None:
        return None
    found = tier.read(entry).tobytes()
    tier.unpin(entry)
    return found


def test_stored_block_is_read_back():
    tier = HostTier(4 * BLOCK_BYTES + 5, BLOCK_BYTES)
    assert store(tier, *KEYS[:3]) == [True] * 3
    assert [read(tier, key) for key in KEYS[:3]] == [content(key).tobytes() for key in KEYS[:3]]
    assert read(tier, KEYS[3]) is None
    assert (len(tier), tier.num_bytes, tier.num_stores) == (3, 3 * BLOCK_BYTES, 3)
    assert tier.capacity_bytes == 4 * BLOCK_BYTES


def test_block_that_is_there_is_not_written_again():
    tier = HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)
    store(tier, KEYS[0])
    assert tier.store(KEYS[0], lambda row: pytest.fail("written twice"))
    assert tier.num_stores == 1


def test_prefix_loses_its_tail_first():
    tier = HostTier(3 * BLOCK_BYTES, BLOCK_BYTES)
    store(tier, *KEYS[:3])
    tier.touch(KEYS[:3])  # head ... tail
    store(tier, KEYS[5], KEYS[6])
    assert set(tier.keys()) == {KEYS[0], KEYS[5], KEYS[6]}


def test_pinned_block_is_never_evicted_and_keeps_its_bytes():
    tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)
    store(tier, *KEYS[:2])
    pinned = tier.pin(KEYS[0])
    store(tier, *KEYS[2:6])
    assert tier.read(pinned).tobytes() == content(KEYS[0]).tobytes()
    assert KEYS[0] in tier
    again = tier.pin(KEYS[5])
    assert store(tier, KEYS[6]) == [False], "every slot is in use"
    tier.unpin(again)
    assert store(tier, KEYS[6]) == [True]
    tier.unpin(pinned)
    store(tier, KEYS[7])
    assert set(tier.keys()) == {KEYS[6], KEYS[7]}


def test_victim_goes_to_the_next_tier_and_is_found_until_it_is_there():
    spilled = []

    def spill(key: bytes, block: np.ndarray) -> None:
        assert key in tier
        assert read(tier, key) == content(key).tobytes() == block.tobytes()
        spilled.append(key)

    tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES, spill)
    store(tier, *KEYS[:4])
    assert spilled == KEYS[:2]
    assert tier.keys() == KEYS[2:4]


def test_victim_that_is_read_while_it_spills_keeps_its_slot():
    pins = []

    def spill(key: bytes, _: np.ndarray) -> None:
        if not pins:
            pins.append(tier.pin(key))

    tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES, spill)
    store(tier, *KEYS[:3])
    assert set(tier.keys()) == {KEYS[0], KEYS[2]}
    assert tier.read(pins[0]).tobytes() == content(KEYS[0]).tobytes()


def test_block_being_written_is_not_found():
    tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)

    def fill(_: np.ndarray) -> None:
        assert KEYS[0] not in tier
        assert tier.pin(KEYS[0]) is None

    assert tier.store(KEYS[0], fill)
    assert KEYS[0] in tier


def test_failed_write_leaves_no_block_and_no_slot_behind():
    def fill(_: np.ndarray) -> None:
        raise OSError("no bytes")

    tier = HostTier(BLOCK_BYTES, BLOCK_BYTES)
    with pytest.raises(OSError, match="no bytes"):
        tier.store(KEYS[0], fill)
    assert KEYS[0] not in tier
    assert store(tier, KEYS[1]) == [True]


def test_failed_spill_keeps_the_victim():
    def spill(*_: object) -> None:
        raise OSError("no room")

    tier = HostTier(BLOCK_BYTES, BLOCK_BYTES, spill)
    store(tier, KEYS[0])
    with pytest.raises(OSError, match="no room"):
        store(tier, KEYS[1])
    tier.spill = None
    assert store(tier, KEYS[1]) == [True]


def test_cleared_tier_keeps_the_bytes_of_pinned_blocks_until_they_are_unpinned():
    tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)
    store(tier, *KEYS[:2])
    pinned = tier.pin(KEYS[0])
    tier.clear()
    assert (len(tier), tier.num_bytes) == (0, 0)
    store(tier, *KEYS[2:5])
    assert tier.read(pinned).tobytes() == content(KEYS[0]).tobytes()
    tier.unpin(pinned)
    assert store(tier, *KEYS[5:7]) == [True] * 2
    assert len(tier) == 2


def test_block_written_while_the_tier_is_cleared_stays_out():
    tier = HostTier(BLOCK_BYTES, BLOCK_BYTES)
    tier.store(KEYS[0], lambda _: tier.clear())
    assert KEYS[0] not in tier
    assert store(tier, KEYS[1]) == [True]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["store", "touch", "pin", "unpin"]), st.sampled_from(KEYS))),
)
def test_any_sequence_equals_a_dictionary_in_order_of_use(slots: int, steps):
    tier = HostTier(slots * BLOCK_BYTES, BLOCK_BYTES)
    model: OrderedDict[bytes, int] = OrderedDict()  # key -> pins
    pins = {}
    for action, key in steps:
        if action == "store":
            victim = next((k for k, count in model.items() if not count), None)
            fits = key in model or len(model) < slots or victim is not None
            if key not in model and fits:
                if len(model) == slots:
                    del model[victim]
                model[key] = 0
            assert store(tier, key) == [fits]
        elif action == "touch":
            tier.touch([key])
            if key in model:
                model.move_to_end(key)
        elif action == "pin":
            entry = tier.pin(key)
            assert (entry is not None) == (key in model)
            if entry is not None:
                model[key] += 1
                pins.setdefault(key, []).append(entry)
        elif pins.get(key):
            model[key] -= 1
            tier.unpin(pins[key].pop())
        assert tier.keys() == list(model)
        for held in model:
            assert read(tier, held) == content(held).tobytes()


def test_readers_beside_a_writer_see_whole_blocks():
    tier = HostTier(3 * BLOCK_BYTES, BLOCK_BYTES)
    wrong, stop = [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for key in KEYS:
                found = read(tier, key)
                if found not in (None, content(key).tobytes()):
                    wrong.append(key)

    readers = [threading.Thread(target=watch) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(2000):
        store(tier, KEYS[number * 5 % 8])
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.mark.parametrize(
    ("capacity_bytes", "message"),
    [
        (BLOCK_BYTES - 1, f"capacity_bytes={BLOCK_BYTES - 1} of host memory holds no block"),
        (2**62, "of host memory cannot be reserved; lower it"),
    ],
)
def test_impossible_size_is_refused(capacity_bytes: int, message: str):
    with pytest.raises(ValueError, match=message):
        HostTier(capacity_bytes, BLOCK_BYTES)
