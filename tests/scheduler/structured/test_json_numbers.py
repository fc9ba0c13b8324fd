"""Numbers of JSON outputs end, whatever the model wants; all else stays as the grammar has it."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.scheduler.structured.grammar_constraint import GrammarConstraint
from paged.scheduler.structured.json_numbers import MAX_NUMBER_LENGTH, NumberLength, NumberTokens
from paged.scheduler.structured.params import StructuredOutputs
from tests.scheduler.structured.grammars import EOS, allowed

BYTES = NumberTokens(lambda token_id: bytes([token_id]), vocab_size=256, num_words=8)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.integers(0, 400), st.booleans(), st.lists(st.integers(1, 5), max_size=30))
def test_the_length_of_the_last_number_is_known_after_every_piece(value, end, ascii_only, sizes):
    text = json.dumps(value, ensure_ascii=ascii_only)[:end].encode("utf-8", "surrogatepass")
    outside = re.sub(rb'"(?:[^"\\]|\\.)*("|$|\\$)', b'"', text)
    expected = len(re.search(rb"[-+.eE0-9]*$", outside)[0])
    number = NumberLength(BYTES)
    rest = text
    for size in sizes:
        number.feed(rest[:size])
        rest = rest[size:]
    number.feed(rest)
    assert number._length == expected
    ends_with_digit = outside[-1:].isdigit()
    assert number.must_end == (expected >= MAX_NUMBER_LENGTH and ends_with_digit)


def test_tokens_that_go_on_with_a_number_are_told_by_their_first_byte():
    vocab = [b"", b"1", b"9,", b".5", b"e", b"E+", b"-", b"}", b"a1", b" 1", b"\xff"]
    tokens = NumberTokens(vocab.__getitem__, vocab_size=len(vocab), num_words=1)
    bits = np.unpackbits(tokens.others.view(np.uint8), bitorder="little")[: len(vocab)]
    assert bits.tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def driven(state: GrammarConstraint, wishes: bytes, limit: int = 200) -> str:
    """The text of a model that takes the first of its wishes, else the least token, there is."""
    text = bytearray()
    while not state.is_over and len(text) < limit:
        tokens = allowed(state)
        wished = [token for token in wishes if token in tokens]
        token = wished[0] if wished else min(tokens - {EOS}, default=EOS)
        assert state.accept(token)
        if token == EOS:
            break
        text.append(token)
    return text.decode()


NUMBER = {"type": "number", "exclusiveMinimum": -3, "exclusiveMaximum": 90}


@pytest.mark.parametrize(
    ("schema", "wishes", "expected"),
    [
        ({"type": "number"}, b"3.", r"3{32}"),
        ({"type": "number"}, b".3", r"3\.3{30}"),
        ({"type": "number"}, b"e3", r"3e3{30}"),
        ({"type": "integer"}, b"-7", r"-7{31}"),
        (NUMBER, b".3", r"3\.3{30}"),
        ({"type": "array", "items": NUMBER, "maxItems": 2}, b"[.4", r"\[4\.4{30},4\.4{30}\]"),
        ({}, b"5", r"5{32}"),
        # What only goes on is not stopped, and strings are nobody's numbers.
        ({"const": 10**40}, b"", r"10{40}"),
        ({"type": "string", "minLength": 60, "maxLength": 60}, b"6", r'"6{60}"'),
        ({"type": "string", "pattern": "^a\\\\[0-9]{50}$"}, b'"a6', r'"a\\\\6{50}"'),
    ],
    ids=str,
)
def test_a_model_that_wants_nothing_but_digits(compiler, schema, wishes, expected):
    state = compiler.compile(StructuredOutputs(json=schema)).start(jumps=False)
    text = driven(state, wishes)
    assert re.fullmatch(expected, text)
    json.loads(text)


def test_other_languages_than_json_have_numbers_of_any_length(compiler):
    state = compiler.compile(StructuredOutputs(regex="[0-9]{80}")).start(jumps=False)
    assert driven(state, b"1") == "1" * 80


def test_forced_digits_count(compiler):
    schema = {"type": "integer", "minimum": 7 * 10**9 + 1, "maximum": 7 * 10**9 + 99}
    schema = {"prefixItems": [{"const": 12}, schema], "items": False, "minItems": 2}
    state = compiler.compile(StructuredOutputs(json={"type": "array", **schema})).start(jumps=True)
    assert bytes(state.take_forced(99)) == b"[12,70000000"
    assert state.number._length == 8
