"""Keys of named content: equal exactly where the engine's hashes over tokens would be."""

from hypothesis import given
from hypothesis import strategies as st

from paged.scheduler.simulator.content import block_hashes

# Few contents of few lengths, so that prefixes coincide often.
SEGMENTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", 1, "1"]), st.integers(1, 9)), min_size=1, max_size=4
)


def tokens(segments) -> list[tuple[str | int, int]]:
    """A token is its content's name and its place in it."""
    return [(content, place) for content, count in segments for place in range(count)]


def prefixes(segments, block_size: int) -> list[tuple]:
    spelt = tokens(segments)
    return [tuple(spelt[:end]) for end in range(block_size, len(spelt) + 1, block_size)]


@given(first=SEGMENTS, second=SEGMENTS, block_size=st.integers(1, 5))
def test_keys_are_equal_only_where_all_tokens_up_to_the_end_of_the_block_are(
    first, second, block_size
):
    same = [a == b for a, b in zip(prefixes(first, block_size), prefixes(second, block_size),
                                   strict=False)]  # fmt: skip
    keys = zip(block_hashes(first, block_size), block_hashes(second, block_size), strict=False)
    for is_same, (a, b) in zip(same, keys, strict=True):
        # Text that is cut differently into segments has keys of its own: a miss, never a false hit.
        assert is_same or a != b


@given(segments=SEGMENTS, cut=st.integers(1, 36), block_size=st.integers(1, 5))
def test_a_prefix_of_the_same_segments_has_the_same_keys(segments, cut, block_size):
    shorter, left = [], cut
    for content, count in segments:
        if left > 0:
            shorter.append((content, min(count, left)))
        left -= count
    keys = block_hashes(segments, block_size)
    assert keys[: len(block_hashes(shorter, block_size))] == block_hashes(shorter, block_size)


@given(segments=SEGMENTS, block_size=st.integers(1, 5))
def test_there_is_one_key_per_full_block_and_all_differ(segments, block_size):
    keys = block_hashes(segments, block_size)
    assert len(keys) == sum(count for _, count in segments) // block_size
    assert len(set(keys)) == len(keys)


def test_answer_of_one_turn_is_hit_by_the_prompt_of_the_next():
    first = [("system", 20), ("user-0", 7), ("answer-0", 30)]
    second = [("system", 20), ("user-0", 7), ("answer-0", 30), ("user-1", 11)]
    assert block_hashes(second, 16)[:3] == block_hashes(first, 16)
