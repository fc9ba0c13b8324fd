"""Items cover every query row with the keys that it sees, and fit tiles on the token axis."""

import jax
import numpy as np
import pytest

from paged.mosaic.plan import AttentionPlan, make_plan
from paged.mosaic.spec import TCGEN05_ROWS, WGMMA_ROWS, fold

ROWS = 32
STATIC = ("num_tokens", "rows_per_item", "sliding_window")
compiled_plan = jax.jit(make_plan, static_argnames=STATIC)

BATCHES = {
    "decode": ([(1000, 1), (17, 1), (640, 1), (1, 1)], 6, 6),
    "mixed": ([(1000, 1), (40, 40), (900, 33), (1, 1)], 96, 6),
    "prefill": ([(300, 300)], 512, 2),
    "full": ([(31, 31), (50, 33)], 64, 2),
    "empty": ([], 40, 3),
}


def plan_of(
    seqs: list[tuple[int, int]], num_tokens: int, num_seqs: int, window: int | None = None
) -> AttentionPlan:
    seq_lens, starts = np.zeros(num_seqs, np.int32), np.zeros(num_seqs + 1, np.int32)
    seq_lens[: len(seqs)] = [context for context, _ in seqs]
    starts[1 : len(seqs) + 1] = np.cumsum([query for _, query in seqs])
    starts[len(seqs) + 1 :] = starts[len(seqs)]
    tables = np.zeros((num_seqs, 64), np.int32)
    return compiled_plan(
        tables,
        seq_lens,
        starts,
        num_tokens=num_tokens,
        rows_per_item=ROWS,
        sliding_window=window,
    )


def live_items(plan: AttentionPlan) -> list[list[int]]:
    return np.asarray(plan.items)[: int(plan.num_live[0])].tolist()


@pytest.mark.parametrize("name", sorted(BATCHES))
@pytest.mark.parametrize("window", [None, 100])
def test_items_cover_each_row_once_with_the_keys_it_sees(name: str, window: int | None):
    seqs, num_tokens, num_seqs = BATCHES[name]
    owners = [(seq, context - query + row, context) for seq, (context, query) in enumerate(seqs)
              for row in range(query)]  # fmt: skip
    seen = np.zeros(num_tokens, np.int32)
    for row, low, high, offset, seq, first_key, end_key, context in live_items(
        plan_of(seqs, num_tokens, num_seqs, window)
    ):
        assert row % ROWS == 0
        assert row <= low < high <= row + ROWS
        seen[low:high] += 1
        for own in range(low, high):
            if own >= len(owners):
                assert end_key == 0, "rows of padding have no keys"
                continue
            assert owners[own] == (seq, own + offset, context)
            position = own + offset
            first = 0 if window is None else max(0, position - window + 1)
            assert first_key <= first
            assert position < end_key <= context
    assert (seen == 1).all()


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_longest_items_come_first(name: str):
    items = np.array(live_items(plan_of(*BATCHES[name])))
    keys = items[:, 6] - items[:, 5]
    assert keys.tolist() == sorted(keys, reverse=True)


def test_number_of_items_is_enough_for_any_batch():
    rng = np.random.default_rng(0)
    for _ in range(30):
        cuts = np.sort(rng.integers(0, 257, 9))
        queries = np.diff(cuts, prepend=0)
        seqs = [(int(query) + 5, int(query)) for query in queries if query]
        plan = plan_of(seqs, 256, 9)
        rows = sum(high - low for _, low, high, *_ in live_items(plan))
        assert int(plan.num_live[0]) <= len(plan.items)
        assert rows == 256


@pytest.mark.parametrize("tile_rows", [WGMMA_ROWS, TCGEN05_ROWS])
def test_every_group_is_folded_into_a_tile(tile_rows: int):
    for group in range(1, 65):
        folding = fold(group, tile_rows)
        assert group % folding.num_heads == 0
        assert folding.num_heads * folding.num_tokens <= tile_rows
        assert folding.num_tokens in (8, 16, 32, 64, 128)


def test_groups_share_tiles_evenly():
    assert [fold(group, 64).num_heads for group in (1, 4, 7, 8, 12, 16)] == [1, 4, 7, 8, 6, 8]
    assert [fold(group, 64).num_tokens for group in (1, 3, 4, 7, 8)] == [64, 16, 16, 8, 8]
    assert [fold(group, 128).num_tokens for group in (1, 3, 4, 7, 16)] == [128, 32, 32, 16, 8]
