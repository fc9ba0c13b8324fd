"""What programs work on covers every query row and every key that it sees, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.triton.plan import AttentionPlan, make_plan

STATIC = ("num_tokens", "group", "block_size", "sliding_window", "wanted_items", "min_part")
compiled_plan = jax.jit(make_plan, static_argnames=STATIC)


def plan_of(
    seqs: list[tuple[int, int]], *, num_tokens: int, num_seqs: int, table_width: int = 64, **options
) -> AttentionPlan:
    """Plan `(context length, query length)` sequences; blocks of 16, 4 q heads a kv head."""
    seq_lens, starts = np.zeros(num_seqs, np.int32), np.zeros(num_seqs + 1, np.int32)
    seq_lens[: len(seqs)] = [context for context, _ in seqs]
    starts[1 : len(seqs) + 1] = np.cumsum([query for _, query in seqs])
    starts[len(seqs) + 1 :] = starts[len(seqs)]
    static = {"sliding_window": None, "wanted_items": 8, "min_part": 128} | options
    tables = np.zeros((num_seqs, table_width), np.int32)
    return compiled_plan(
        tables, seq_lens, starts, num_tokens=num_tokens, group=4, block_size=16, **static
    )


def covered(plan: AttentionPlan, num_tokens: int, num_keys: int) -> np.ndarray:
    """How many items have a query row and a key, `[num_tokens, num_keys]`."""
    counts = np.zeros((num_tokens, num_keys), np.int32)
    for row, num_rows, _, _, first_key, end_key, _, _ in np.asarray(plan.items).tolist():
        counts[row : row + num_rows, first_key:end_key] += 1
    return counts


BATCHES = {
    "decode": ([(1000, 1), (17, 1), (640, 1), (1, 1)], 6, 6),
    "decode_of_several_rows": ([(900, 3), (31, 2)], 6, 6),
    "mixed": ([(1000, 1), (40, 40), (900, 33), (1, 1)], 96, 6),
    "prefill": ([(300, 300)], 512, 2),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
@pytest.mark.parametrize("window", [None, 100, 400])
def test_items_cover_each_row_and_key_once(name: str, window: int | None):
    seqs, num_tokens, num_seqs = BATCHES[name]
    plan = plan_of(seqs, num_tokens=num_tokens, num_seqs=num_seqs, sliding_window=window)
    counts = covered(plan, num_tokens, 1024)
    assert counts.max() == 1
    row = 0
    for context, query in seqs:
        for position in range(context - query, context):
            first = 0 if window is None else max(0, position - window + 1)
            assert counts[row, first : position + 1].all(), (row, position)
            assert not counts[row, context:].any()
            row += 1
    assert not counts[row:].any(), "rows of padding have no keys"


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_every_row_of_the_output_is_written(name: str):
    seqs, num_tokens, num_seqs = BATCHES[name]
    plan = plan_of(seqs, num_tokens=num_tokens, num_seqs=num_seqs)
    writers = np.zeros(num_tokens, np.int32)
    for row, num_rows, *_, part, _ in np.asarray(plan.items).tolist():
        if part <= 0:
            writers[row : row + num_rows] += 1
    assert (writers == 1).all()


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_tiles_name_the_items_of_their_row(name: str):
    seqs, num_tokens, num_seqs = BATCHES[name]
    plan = plan_of(seqs, num_tokens=num_tokens, num_seqs=num_seqs)
    narrow = np.asarray(plan.items)[plan.num_wide_items :]
    for first, count, row, _ in np.asarray(plan.tiles).tolist():
        if count > 1:
            mine = narrow[first : first + count]
            assert mine[:, 0].tolist() == [row] * count
            assert mine[:, 6].tolist() == list(range(count))
    in_parts = narrow[(narrow[:, 6] >= 0) & (narrow[:, 1] > 0)]
    assert sum(np.asarray(plan.tiles)[:, 1]) == len(in_parts) + np.count_nonzero(
        (narrow[:, 6] < 0) & (narrow[:, 1] > 0)
    )


def test_long_sequence_among_short_ones_gets_most_items():
    seqs = [(65536, 1), *[(1024, 1)] * 63]
    plan = plan_of(
        seqs, num_tokens=64, num_seqs=64, table_width=4096, wanted_items=132, min_part=256
    )
    counts = np.asarray(plan.tiles)[:, 1]
    assert counts[0] > 60
    assert (counts[1:] <= 2).all()
    lengths = np.asarray(plan.items)
    keys = (lengths[:, 5] - lengths[:, 4])[lengths[:, 1] > 0]
    assert keys.max() <= 1.1 * 65536 * 2 / 132


def test_number_of_items_is_enough_for_any_batch():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        contexts = rng.integers(1, 1025, 16).tolist()
        plan = plan_of([(n, 1) for n in contexts], num_tokens=16, num_seqs=16, wanted_items=23)
        num_live = np.count_nonzero(np.asarray(plan.items)[:, 1])
        assert num_live == np.asarray(plan.tiles)[:, 1].sum()
        counts = covered(plan, 16, 1024)
        assert counts.sum() == sum(contexts)


def test_longest_items_of_a_sequence_come_first():
    plan = plan_of([(512, 512)], num_tokens=512, num_seqs=1)
    items = np.asarray(plan.items)[: plan.num_wide_items]
    lengths = items[items[:, 1] > 0, 5]
    assert lengths.tolist() == sorted(lengths, reverse=True)


def test_plan_depends_on_shapes_alone_in_its_static_parts():
    plans = [plan_of(seqs, num_tokens=96, num_seqs=6) for seqs in ([], [(900, 90), (5, 1)])]
    assert jax.tree.structure(plans[0]) == jax.tree.structure(plans[1])
    shapes = [jax.tree.map(jnp.shape, plan) for plan in plans]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
