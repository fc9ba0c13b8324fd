"""Which layers share block tables; examples of the reference engine's documentation."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.cache_groups import CacheGroup, group_layers, layers_per_group, one_group


def shape(layer_windows) -> list[tuple[int | None, int]]:
    return [(group.sliding_window, len(group.layers)) for group in group_layers(layer_windows)]


def test_layers_of_one_kind_are_one_group():
    assert group_layers([None] * 4) == one_group(4) == (CacheGroup((0, 1, 2, 3)),)


def test_sliding_layers_alone_keep_all_blocks():
    # Penalties read a request's tokens through the first table, which may drop nothing.
    assert group_layers([8] * 3) == group_layers([8, 16, 8]) == one_group(3)


@pytest.mark.parametrize(
    ("layer_windows", "expected"),
    [
        # 10 full and 20 sliding layers: three groups of ten.
        ([None, 8, 8] * 10, [(None, 10), (8, 10), (8, 10)]),
        # gpt-oss-20b: 12 of each.
        ([128, None] * 12, [(None, 12), (128, 12)]),
        # Gemma 3 27B, 10 full and 52 sliding: six sliding groups, padded to ten.
        (
            ([1024] * 5 + [None]) * 10 + [1024] * 2,
            [(None, 10), (1024, 9), (1024, 9), (1024, 9), (1024, 9), (1024, 8), (1024, 8)],
        ),
        # 5 < 1.5 x 4: one padded group of full layers instead of more tables.
        ([8] * 5 + [None] * 4, [(None, 4), (8, 5)]),
        # 6 is not: the full layers are cut in two.
        ([8] * 4 + [None] * 6, [(None, 3), (None, 3), (8, 4)]),
    ],
)
def test_groups_have_as_many_layers_as_the_rarer_kind(layer_windows, expected):
    assert shape(layer_windows) == expected


@given(st.lists(st.sampled_from([None, None, 8, 16]), min_size=1, max_size=40))
def test_every_layer_has_one_place_of_its_own(layer_windows):
    groups = group_layers(layer_windows)
    layers = Counter(layer for group in groups for layer in group.layers)
    assert layers == Counter(range(len(layer_windows)))
    assert groups[0].sliding_window is None
    for group in groups:
        assert 0 < len(group.layers) <= layers_per_group(groups)
        windows = {layer_windows[layer] for layer in group.layers}
        if len(groups) > 1:
            assert windows == {group.sliding_window}
    kept = [group.sliding_window for group in groups]
    assert kept == sorted(kept, key=lambda window: window is not None)  # full ones first
