"""Schemas are rewritten to be no wider than they were, and nothing else changes."""

import datetime
import json
import random

import pytest

from paged.scheduler.structured.params import StructuredOutputs
from paged.scheduler.structured.schemas import rewrite_schema
from tests.scheduler.structured.grammars import EOS, accepts, allowed


def test_what_only_looks_like_a_schema_is_left_alone():
    schema = {
        "properties": {"const": {"format": "date"}, "format": {"const": {"properties": {}}}},
        "required": ["format"],
        "default": {"format": "date"},
        "items": [{"uniqueItems": False}, True],
        "examples": [{"properties": {}}],
    }
    before = json.dumps(schema)
    rewritten = rewrite_schema(schema, closes_objects=True)
    assert json.dumps(schema) == before
    assert set(rewritten["properties"]["const"]) == {"pattern"}
    assert rewritten["properties"]["format"] == {"const": {"properties": {}}}
    assert rewritten["default"] == {"format": "date"}
    assert rewritten["items"] == [{}, True]
    assert rewritten["examples"] == [{"properties": {}}]
    assert rewritten["additionalProperties"] is False


def test_open_objects_stay_open():
    schema = {"properties": {}, "additionalProperties": {"properties": {}}}
    assert rewrite_schema(schema, closes_objects=False) == schema
    closed = rewrite_schema(schema, closes_objects=True)
    assert closed["additionalProperties"] == {"properties": {}, "additionalProperties": False}


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
REF, NESTED = {"$ref": "#/$defs/x"}, {"properties": {"c": A}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, "1"),
        ({"anyOf": [A, B]}, "11"),
        ({"allOf": [A, {"description": "b"}]}, "1"),
        ({"allOf": [A, B]}, "00"),
        ({**A, "anyOf": [B, A]}, "000"),
        ({"allOf": [A, {"anyOf": [B, A]}]}, "000"),
        ({"allOf": [A, NESTED]}, "001"),
        ({**REF, "$defs": {"x": A}}, "1"),
        ({**A, **REF, "$defs": {"x": B, "y": A}}, "001"),
        ({"allOf": [REF, B], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": A}}, "00"),
        ({"items": {"allOf": [REF, B]}, "$defs": {"x": {"anyOf": [A, B]}}}, "000"),
        ({**A, "required": ["b"]}, "0"),
        ({**A, "additionalProperties": {}}, "0"),
    ],
)
def test_objects_are_closed_unless_others_say_what_they_have(schema, expected):
    def closings(node):
        if isinstance(node, list):
            return "".join(map(closings, node))
        if not isinstance(node, dict):
            return ""
        own = str(int(node.get("additionalProperties") is False)) if "properties" in node else ""
        return own + "".join(map(closings, node.values()))

    assert closings(rewrite_schema(schema, closes_objects=True)) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"pattern": "b[aeiou]+d"}, "bad", True),
        ({"pattern": "b[aeiou]+d"}, "say \n" * 10 + "bad, bud", True),
        ({"pattern": "b[aeiou]+d"}, "x" * 128 + "bad", True),
        ({"pattern": "b[aeiou]+d"}, "x" * 129 + "bad", False),
        ({"pattern": "b[aeiou]+d"}, "x" * 20, False),
        ({"pattern": "bad|bed"}, "x" * 9 + "bed" + "y" * 300, True),
        ({"pattern": r"\$\^[$^]"}, "x" * 129 + "$^$", False),
        ({"allOf": [{"pattern": "bad"}, {"pattern": "bed"}]}, "x" * 99 + "bad, bed", True),
        # Bounded, this would allow nothing.
        ({"allOf": [{"pattern": "bad"}, {"pattern": "^x{140}bad$"}]}, "x" * 140 + "bad", True),
        # Who says where a match is, means it.
        ({"pattern": "^bad|bed"}, "x" * 200 + "bed", True),
        ({"pattern": "bad$"}, "x" * 200 + "bad", True),
        ({"anyOf": [{"type": "string", "pattern": "bad"}]}, "x" * 200 + "bad", False),
    ],
)
def test_a_pattern_that_may_match_anywhere_matches_before_long(compiler, schema, text, expected):
    wanted = {"json": {"type": "string", **schema}}
    assert accepts(compiler, json.dumps(text), **wanted) is expected


@pytest.mark.parametrize("name", ["anyOf", "oneOf"])
def test_alternatives_that_must_exclude_each_other_stay_as_they_are(name):
    schema = {name: [{"properties": {"a": {"pattern": "x"}}}]}
    assert (rewrite_schema(schema, closes_objects=False) == schema) is (name == "oneOf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-02-29", True),
        ("2023-02-29", False),
        ("1900-02-29", False),
        ("2000-02-29", True),
        ("0000-02-28", False),
        ("0000-02-29", False),
        ("0004-02-29", True),
        ("1000-01-01", True),
        ("2023-04-31", False),
        ("2023-12-31", True),
        ("9999-11-30", True),
    ],
)
def test_dates(compiler, text, expected):
    wanted = {"json": {"type": "string", "format": "date"}}
    assert accepts(compiler, f'"{text}"', **wanted) is expected
    wanted = {"json": {"type": "string", "format": "date-time"}}
    assert accepts(compiler, f'"{text}T23:59:59.5+01:30"', **wanted) is expected


@pytest.mark.parametrize(
    ("name", "parse"),
    [
        ("date", datetime.date.fromisoformat),
        ("time", datetime.time.fromisoformat),
        ("date-time", datetime.datetime.fromisoformat),
    ],
)
def test_every_moment_can_be_parsed(compiler, name, parse):
    grammar = compiler.compile(StructuredOutputs(json={"type": "string", "format": name}))
    rng = random.Random(3)
    for _ in range(100):
        state, output = grammar.start(jumps=False), bytearray()
        while not state.is_over:
            token = rng.choice(sorted(allowed(state) - {EOS}))
            assert state.accept(token)
            output.append(token)
        parse(json.loads(output))
