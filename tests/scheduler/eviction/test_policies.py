"""Policies by published figures, by hand-made traces and against an exhaustive search."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eviction_table import (
    TRACES,
    TraceRequest,
    document,
    hit_blocks,
    passes,
    play,
)
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.eviction.arc import ARC
from paged.scheduler.eviction.cost import CostAware, RecomputeCost
from paged.scheduler.eviction.insertion import LIP
from paged.scheduler.eviction.lookahead import Lookahead
from paged.scheduler.eviction.policies import DEFAULT_POLICY, POLICIES, make_policy
from paged.scheduler.eviction.policy import EvictionPolicy

BLOCK_SIZE = 16

# Ten documents of 5,033 tokens, one at a time, in a pool for four: an article's experiment with
# vLLM, and the figures of a simulator that shares no code with this one.
REFERENCE = {
    "lru": (0, 0, 21_488),
    "mru": (0, 21_488, 21_488),
    "lip": (0, 16_464, 16_464),
    "arc": (0, 0, 21_488),
    "lookahead": (0, 21_488, 21_488),
    # Documents of equal length and use: cost cannot tell them apart better than recency.
    "cost": (0, 0, 21_488),
}
TEN_PASSES = {"lru": 0, "mru": 10_290, "lip": 9_261, "lookahead": 10_290}


def reference_hits(policy: EvictionPolicy, orders: str = "ffr", queue: int = 8) -> list[int]:
    """Hit tokens per pass."""
    pool = BlockPool(1345, BLOCK_SIZE, policy=policy)
    hits = play(pool, passes(orders), queue)
    return [BLOCK_SIZE * sum(batch) for batch in itertools.batched(hits, 10)]


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_experiment_hits_what_was_published(name):
    assert tuple(reference_hits(make_policy(name))) == REFERENCE[name]


@pytest.mark.parametrize("name", TEN_PASSES)
def test_ten_forward_passes_hit_what_was_published(name):
    hits = reference_hits(make_policy(name), orders="f" * 10)
    assert sum(hits) == BLOCK_SIZE * TEN_PASSES[name]


@pytest.mark.parametrize(
    ("queue", "second_pass"),
    [(1, 0), (4, 0), (5, 2_784), (6, 12_832), (8, 21_488)],
)
def test_lookahead_hits_what_was_published_for_each_length_of_the_queue(queue, second_pass):
    assert reference_hits(Lookahead(), queue=queue) == [0, second_pass, 21_488]
    assert reference_hits(Lookahead(window=queue), queue=30) == [0, second_pass, 21_488]


def test_bip_keeps_every_nth_cold_release():
    # By hand: every second new document is kept; the others pass through the eviction end.
    pool = BlockPool(4, BLOCK_SIZE, policy=LIP(epsilon=0.5))
    order = [b"a", b"b", b"c", b"d", b"e"]
    list(play(pool, (TraceRequest((name,)) for name in order)))
    assert [name for name in order if pool.lookup(name)] == [b"d", b"e"]
    lip = BlockPool(4, BLOCK_SIZE, policy=LIP())
    list(play(lip, (TraceRequest((name,)) for name in order)))
    assert [name for name in order if lip.lookup(name)] == [b"a", b"e"]


def test_arc_learns_from_ghosts_step_by_step():
    policy = ARC()
    pool = BlockPool(5, BLOCK_SIZE, policy=policy)  # three contents beside the running request
    # Request, hit, content that is cached afterwards, target for content seen once: by hand.
    steps = [
        ("a", 0, "a", 0),
        ("a", 1, "a", 0),
        ("b", 0, "ab", 0),
        ("c", 0, "abc", 0),
        ("d", 0, "acd", 0),  # b goes: seen once, and its list may be empty
        ("a", 1, "acd", 0),
        ("b", 0, "abd", 1),  # ghost of the recent list: that list was too short
        ("e", 0, "abe", 1),
        ("c", 0, "abc", 2),
        ("f", 0, "bcf", 2),  # nothing is recent, so a goes though it was hit
        ("g", 0, "cfg", 2),  # f alone is below the target, so b goes
        ("f", 1, "cfg", 2),
        ("a", 0, "afg", 1),  # ghost of the frequent list
    ]
    for name, hit, cached, target in steps:
        assert list(play(pool, iter([TraceRequest((name.encode(),))]))) == [hit]
        assert "".join(x for x in "abcdefg" if pool.lookup(x.encode())) == cached
        assert policy.target == target
    trace = [TraceRequest((name.encode(),)) for name, *_ in steps]
    assert sum(play(BlockPool(5, BLOCK_SIZE), iter(trace))) == 2, "LRU misses the first return of a"


def test_arc_forgets_ghosts_on_reset():
    policy = ARC()
    pool = BlockPool(3, BLOCK_SIZE, policy=policy)
    for name in "abab":
        list(play(pool, iter([TraceRequest((name.encode(),))])))
    assert policy.target > 0
    assert pool.reset_prefix_cache()
    assert policy.target == 0
    list(play(pool, iter([TraceRequest((b"a",))])))
    assert policy.target == 0


def cost_pool() -> BlockPool:
    """Room for four contents and a running request; a block at depth d costs 2 + 2 d."""
    cost = RecomputeCost(linear_flops=1, attention_flops=1, block_size=2)
    return BlockPool(6, BLOCK_SIZE, policy=CostAware(cost))


def test_cost_keeps_deep_blocks_before_shallow_ones():
    trace = [document("long", 3), document("short", 1), document("new", 1), document("long", 3)]
    assert list(play(cost_pool(), iter(trace))) == [0, 0, 0, 3]
    assert list(play(BlockPool(6, BLOCK_SIZE), iter(trace))) == [0, 0, 0, 2]


@pytest.mark.parametrize(("num_once", "hits"), [(6, 3), (7, 2)])
def test_cost_gives_up_what_is_not_used_again(num_once, hits):
    # The last block of "long" scores 2 + 2 uses x 6 = 14. Each document that comes once costs 2
    # above the clock, which stands at 12 when the sixth arrives: the seventh finds 14 and 14, and
    # the older one goes.
    pool = cost_pool()
    first = [document("long", 3), document("short", 1), document("once 1", 1), document("long", 3)]
    list(play(pool, iter(first)))
    list(play(pool, (document(f"once {i}", 1) for i in range(2, num_once + 1))))
    assert list(play(pool, iter([document("long", 3)]))) == [hits]


def test_recompute_cost_of_a_model_by_hand():
    # Llama 3.1 8B: 2 x 8e9 operations in linear layers; attention 4 x 32 layers x 32 heads x 128
    # = 524,288 per token before. At depth 1,907 of 16-token blocks (30,520 tokens) they are equal.
    cost = RecomputeCost.of_model(
        num_parameters=8_000_000_000, num_layers=32, num_q_heads=32, head_dim=128, block_size=16
    )
    assert cost.attention_flops == 524_288
    assert cost.of_block(0) == pytest.approx(1 + 8 * 524_288 / 16e9)
    assert cost.of_block(1907) == pytest.approx(2, rel=1e-3)
    assert RecomputeCost().of_block(1874) == pytest.approx(2, rel=1e-3)


def test_lookahead_forgets_requests_that_leave_from_anywhere():
    policy = Lookahead(window=2)
    pool = BlockPool(5, BLOCK_SIZE, policy=policy)
    list(play(pool, iter([TraceRequest((name,)) for name in (b"a", b"b", b"c")])))

    def order() -> bytes:
        return b"".join(pool.block_hash(block_id) or b"" for block_id in policy.released())

    assert order() == b"abc"
    policy.expect("first", [b"b"])
    policy.expect("second", [b"a"])
    policy.expect("behind the window", [b"c"])
    assert order() == b"cab"
    policy.forget("second")
    assert order() == b"acb"
    policy.expect("first", [b"b"])  # asked again: now last
    assert order() == b"abc"
    policy.forget("behind the window")
    policy.forget("never expected")
    policy.forget("first")
    assert sorted(order()) == sorted(b"abc")


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(bytes)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=8), num_usable=st.integers(4, 6))
def test_lookahead_over_everything_is_the_offline_optimum(texts, num_usable):
    chains = [tuple(text[: i + 1] for i in range(len(text))) for text in texts]

    @functools.cache
    def best(index: int, cached: frozenset[bytes]) -> int:
        """Most hits from here on, over all closed sets that can be kept."""
        if index == len(chains):
            return 0
        chain = chains[index]
        hits = sum(1 for _ in itertools.takewhile(cached.__contains__, chain))
        others = sorted(cached - set(chain))
        num_kept = min(len(others), num_usable - 1 - len(chain))
        after = (frozenset(kept) | set(chain) for kept in itertools.combinations(others, num_kept))
        closed = (keys for keys in after if all(k[:-1] in keys for k in keys if k[:-1]))
        return hits + max(best(index + 1, frozenset(keys)) for keys in closed)

    pool = BlockPool(num_usable + 1, BLOCK_SIZE, policy=Lookahead())
    hits = sum(play(pool, map(TraceRequest, chains), queue=len(chains)))
    assert hits == best(0, frozenset())


@pytest.mark.parametrize("trace", ["zipf", "chat", "agent tree"])
def test_nobody_beats_the_offline_optimum(trace):
    optimum = hit_blocks("lookahead", TRACES[trace](0), queue=1000)
    hits = {name: hit_blocks(name, TRACES[trace](0)) for name in POLICIES}
    assert max(hits, key=hits.__getitem__) == "lookahead"
    assert max(hits.values()) <= optimum


def test_unknown_names_and_impossible_arguments_are_refused():
    assert DEFAULT_POLICY in POLICIES
    with pytest.raises(ValueError, match="eviction policy 'fifo' is unknown; choose from lru, mru"):
        make_policy("fifo")
    with pytest.raises(ValueError, match=r"epsilon=1\.5 must be a share of releases"):
        make_policy("bip", epsilon=1.5)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        make_policy("lookahead", window=0)
    with pytest.raises(ValueError, match="linear_flops > 0"):
        RecomputeCost(linear_flops=0)
    with pytest.raises(ValueError, match="hysteresis=0 must be positive"):
        make_policy("auto", hysteresis=0)
    with pytest.raises(ValueError, match="min_hit_share=2 must be a share of blocks"):
        make_policy("auto", min_hit_share=2)
