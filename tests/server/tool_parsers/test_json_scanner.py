"""`JsonScanner` against Python's own parser."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.server.tool_parsers.json_scanner import JsonScanner
from tests.server.tool_parsers.reading import PLACES, cut, texts_of

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
FRAGMENTS = ["{", "}", "[", "]", ",", ":", '"a"', '"', "\\", "\\u00e9", "1", "-0.5e+3", "true", " "]


def scan(pieces: list[str]) -> tuple[JsonScanner, str, str]:
    """Return the scanner, the JSON it took and the text that it left."""
    scanner, taken, left = JsonScanner(), "", ""
    for piece in pieces:
        end, json_text = scanner.scan(piece)
        taken += json_text
        left += piece[end:]
    return scanner, taken, left


@given(VALUES, st.sampled_from([None, 2]), PLACES)
def test_takes_exactly_the_value(value, indent, places):
    text = json.dumps(value, indent=indent)
    scanner, taken, left = scan(list(cut(text + " ]", places)))
    assert scanner.is_complete
    assert (taken, left) == (text, " ]")


@given(texts_of(FRAGMENTS), PLACES)
def test_agrees_with_python_on_what_is_json(text, places):
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        json.loads(text, strict=False, parse_constant=refuse)
        is_json = True
    except ValueError:
        is_json = False
    scanner, _, left = scan([*cut(text, places), " "])
    assert (scanner.is_complete and not left.strip(" \t\n\r")) == is_json


def test_control_characters_in_strings_are_escaped_and_others_stay():
    _, taken, _ = scan(['{\n"a": "x\ny\t\x01"', "\n}"])
    assert json.loads(taken) == {"a": "x\ny\t\x01"}
    assert taken.startswith("{\n")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000])
def test_depth_is_no_recursion(text):
    scanner, _, left = scan([text])
    assert not scanner.is_wrong
    assert not left
