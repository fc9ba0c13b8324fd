"""Outputs that go round in circles: found where a search by brute force finds them."""

import itertools
import random

import pytest

from paged.scheduler.params import SamplingParams
from paged.scheduler.repetition import RepetitionDetection
from tests.scheduler.fakes import make_engine, spell


def brute_force(tokens: list[int], low: int, high: int, count: int) -> bool:
    return any(
        len(tokens) >= size * count
        and len({tuple(tokens[len(tokens) - (i + 1) * size :][:size]) for i in range(count)}) == 1
        for size in range(max(1, low), high + 1)
    )


def test_it_finds_what_brute_force_finds():
    draw = random.Random(0)
    num_found = 0
    for low, high, count in itertools.product((0, 1, 2), (2, 3, 5), (2, 3)):
        detection = RepetitionDetection(high, low, count)
        for _ in range(200):
            tokens = draw.choices([1, 2], k=draw.randint(0, 12))
            expected = brute_force(tokens, low, high, count)
            assert detection.finds(tokens) == expected, (low, high, count, tokens)
            num_found += expected
    assert num_found > 500


def test_nothing_is_found_when_it_is_off():
    assert not RepetitionDetection().finds([1] * 100)


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ((3, 4, 2), "min_pattern_size <= max_pattern_size"),
        ((2000, 0, 2), "<= 1024"),
        ((3, -1, 2), "0 <= min_pattern_size"),
        ((3, 0, 1), "min_count >= 2"),
    ],
)
def test_contradictions_are_refused(sizes, rule):
    with pytest.raises(ValueError, match=rule):
        RepetitionDetection(*sizes)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("min_tokens", "text"), [(0, "xababab"), (9, "xabababab")])
def test_the_engine_ends_such_an_output(stream, min_tokens, text):
    engine = make_engine(spell("xababababababab"))
    params = SamplingParams(
        max_tokens=15,
        min_tokens=min_tokens,
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
    )
    engine.add_request("r", [65, 66], params, stream=stream)
    outputs = []
    while engine.has_unfinished:
        outputs += [sample for output in engine.step()[0] for sample in output.outputs]
    assert "".join(sample.text for sample in outputs) == text
    assert outputs[-1].finish_reason == "repetition"
    assert outputs[-1].stop_reason == "repetition_detected"
