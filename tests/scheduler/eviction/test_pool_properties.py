"""Random requests, pins, roll-backs and resets on a small pool, for every policy.

The model knows content as the tuple of symbols that a block and all before it hold, keeps plain
dictionaries, and lets the pool choose only which released block goes. What LRU chooses is
predicted, too, by a list.
"""

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged.scheduler.block_pool import NULL_BLOCK, BlockPool
from paged.scheduler.eviction.policies import POLICIES, make_policy

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(bytes)
PICKS = st.integers(0, 1 << 16)


class PoolMachine(RuleBasedStateMachine):
    policy_name = "lru"

    @initialize(num_blocks=st.integers(4, 14))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, 16, policy=make_policy(self.policy_name))
        self.contents: dict[int, bytes] = {}  # in order of registration
        self.tables: list[tuple[list[int], bytes]] = []
        self.pins: list[list[int]] = []
        self.blank = list(range(1, num_blocks))
        self.order: list[int] = []  # released, as a list-based LRU has it
        self.queue: dict[int, bytes] = {}
        self.num_expected = 0
        self.announced: list[tuple[int, bytes]] = []
        self.pool.on_evict = lambda *call: self.announced.append(call)

    # What the model can say about the pool.

    def refs(self, block_id: int) -> int:
        return sum(table.count(block_id) for table, _ in self.tables) + sum(
            pin.count(block_id) for pin in self.pins
        )

    def find(self, text: bytes) -> int | None:
        return next((b for b, content in self.contents.items() if content == text), None)

    def find_prefix(self, text: bytes) -> list[int]:
        found = [self.find(text[: i + 1]) for i in range(len(text))]
        return found[: found.index(None)] if None in found else found

    def num_free(self) -> int:
        return len(self.blank) + len(self.order)

    # Steps shared by the rules.

    def allocate(self, count: int) -> list[int]:
        released = list(self.order)
        self.announced.clear()
        block_ids = self.pool.allocate(count)
        plain = block_ids[: len(self.blank)]
        assert plain == self.blank[: len(plain)]
        del self.blank[: len(plain)]
        victims = block_ids[len(plain) :]
        assert set(victims) <= set(released)
        assert len(set(victims)) == len(victims)
        if self.policy_name == "lru":
            assert victims == released[: len(victims)]
        lost = {block_id: self.contents.pop(block_id) for block_id in victims}
        for block_id in victims:
            self.order.remove(block_id)
        kept = set(self.contents.values())
        assert {text for _, text in self.announced} == set(lost.values()) - kept
        assert all(lost[block_id] == text for block_id, text in self.announced)
        return block_ids

    def free(self, block_ids: list[int]) -> None:
        """Drop one reference of each; the model's tables and pins no longer have it."""
        self.pool.free(block_ids)
        self.settle(block_ids)

    def settle(self, block_ids: list[int]) -> None:
        blank = [b for b in block_ids if not self.refs(b) and b not in self.contents]
        self.blank = blank + self.blank
        self.order += [b for b in block_ids if not self.refs(b) and b in self.contents]

    def touch(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if block_id in self.order:
                self.order.remove(block_id)

    def register(self, table: list[int], index: int, text: bytes) -> None:
        parent = table[index - 1] if index else NULL_BLOCK
        self.pool.register(table[index], text[: index + 1], parent)
        if not index or parent in self.contents:
            self.contents[table[index]] = text[: index + 1]

    def lose(self, block_ids: list[int]) -> None:
        """Content that the pool was told to drop, with all that can't stay without it."""
        todo = list(block_ids)
        while todo:
            block_id = todo.pop()
            if block_id not in self.contents:
                continue
            text = self.contents.pop(block_id)
            same = [b for b, other in self.contents.items() if other == text]
            if not same or (self.refs(block_id) and not any(map(self.refs, same))):
                todo += [b for b, other in self.contents.items() if other[:-1] == text]
        gone = [b for b in self.order if b not in self.contents]
        self.order = [b for b in self.order if b in self.contents]
        # Their order among the blocks without content is the pool's choice.
        front = self.pool.free_order()[: len(gone)]
        assert sorted(front) == sorted(gone)
        self.blank = front + self.blank

    # Requests.

    def admit(self, text: bytes, num_blank: int, recompute_last: bool) -> None:
        hits = self.find_prefix(text)
        if recompute_last and len(hits) == len(text):
            hits = hits[:-1]
        count = len(text) + num_blank - len(hits)
        if count + sum(not self.refs(b) for b in hits) > self.num_free():
            return
        assert self.pool.num_unreferenced(hits) == sum(not self.refs(b) for b in hits)
        self.pool.touch(hits)
        self.touch(hits)
        keys = [text[: i + 1] for i in range(len(text))]
        self.pool.policy.lookup(keys, len(hits))
        self.tables.append((table := list(hits), text))
        table += self.allocate(count)
        for index in range(len(hits), len(text)):
            self.register(table, index, text)

    @rule(text=TEXTS, num_blank=st.integers(0, 2), recompute_last=st.booleans())
    def request(self, text, num_blank, recompute_last):
        self.admit(text, num_blank, recompute_last)

    @rule(text=TEXTS)
    def expect(self, text):
        keys = [text[: i + 1] for i in range(len(text))]
        self.pool.policy.expect(self.num_expected, keys)
        self.queue[self.num_expected] = text
        self.num_expected += 1

    @precondition(lambda self: self.queue)
    @rule(is_admitted=st.booleans(), is_last=st.booleans())
    def leave_queue(self, is_admitted, is_last):
        number = (max if is_last else min)(self.queue)
        self.pool.policy.forget(number)
        text = self.queue.pop(number)
        if is_admitted:
            self.admit(text, 1, True)

    @precondition(lambda self: self.tables)
    @rule(pick=PICKS, symbol=st.integers(0, 1))
    def fill_a_block(self, pick, symbol):
        table, text = self.tables[pick % len(self.tables)]
        if len(table) == len(text):
            if not self.num_free():
                return
            table += self.allocate(1)
        longer = text + bytes([symbol])
        self.tables[pick % len(self.tables)] = table, longer
        self.register(table, len(text), longer)

    @precondition(lambda self: self.tables)
    @rule(pick=PICKS)
    def finish(self, pick):
        table, _ = self.tables.pop(pick % len(self.tables))
        self.free(table[::-1])

    @precondition(lambda self: self.tables)
    @rule(pick=PICKS)
    def give_back_the_last_block(self, pick):
        table, text = self.tables[pick % len(self.tables)]
        if table:
            self.tables[pick % len(self.tables)] = table, text[: len(table) - 1]
            self.free([table.pop()])

    # Pins, roll-backs, resets.

    @rule(text=TEXTS)
    def pin(self, text):
        prefix = self.find_prefix(text)
        self.pool.pin(prefix)
        self.touch(prefix)
        self.pins.append(prefix)

    @precondition(lambda self: self.pins)
    @rule(pick=PICKS)
    def unpin(self, pick):
        prefix = self.pins.pop(pick % len(self.pins))
        self.pool.unpin(prefix)
        self.settle(prefix[::-1])

    @precondition(lambda self: any(table for table, _ in self.tables))
    @rule(pick=PICKS, place=PICKS)
    def unregister(self, pick, place):
        tables = [table for table, _ in self.tables if table]
        table = tables[pick % len(tables)]
        block_id = table[place % len(table)]
        self.pool.unregister(block_id)
        self.lose([block_id])

    @rule(blocks=st.lists(PICKS, max_size=3))
    def evict(self, blocks):
        block_ids = [1 + block % (self.pool.num_blocks - 1) for block in blocks]
        self.pool.evict(block_ids)
        self.lose(block_ids)

    @rule()
    def reset(self):
        order = self.pool.free_order()
        is_idle = len(order) == self.pool.num_usable
        assert self.pool.reset_prefix_cache() == is_idle
        if is_idle:
            assert self.pool.free_order() == order
            self.contents.clear()
            self.order.clear()
            self.blank = order

    # What must hold at any time.

    @invariant()
    def pool_agrees_with_the_model(self):
        pool = self.pool
        for block_id in range(1, pool.num_blocks):
            assert pool.ref_count(block_id) == self.refs(block_id)
            assert pool.block_hash(block_id) == self.contents.get(block_id)
        assert pool.num_free == self.num_free()
        assert pool.num_pinned == len({b for pin in self.pins for b in pin})
        for text in self.contents.values():
            assert pool.lookup(text) == self.find(text)

    @invariant()
    def cached_set_is_closed_under_parent(self):
        texts = set(self.contents.values())
        assert not {text for text in texts if text[:-1] and text[:-1] not in texts}

    @invariant()
    def policy_holds_exactly_the_released_blocks(self):
        released = self.pool.policy.released()
        assert sorted(released) == sorted(self.order)
        if self.policy_name == "lru":
            assert released == self.order
        assert self.pool.free_order() == self.blank + released

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        while self.tables:
            self.finish(0)
        while self.pins:
            self.unpin(0)
        assert self.pool.num_free == self.pool.num_usable
        assert sorted(self.allocate(self.pool.num_usable)) == list(range(1, self.pool.num_blocks))
        assert not self.contents
        assert self.pool.policy.released() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_pool_with_policy_agrees_with_a_plain_model(policy, caplog):
    caplog.set_level(logging.ERROR)  # every refused reset warns
    machine = type(policy, (PoolMachine,), {"policy_name": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=50, stateful_step_count=40, deadline=None)
    )
