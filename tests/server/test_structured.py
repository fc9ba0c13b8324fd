"""What the fields of a request make of its output's constraint; the engine is a fake."""

import json

import pytest

from paged.scheduler.params import ParameterError
from paged.scheduler.structured.params import StructuredOutputs
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, COMPLETIONS, error_of, ok

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
BODIES = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}


def constraint_of(path: str, fields: dict) -> StructuredOutputs | None:
    engine = FakeEngine()
    ok(path, {**BODIES[path], **fields}, engine)
    return engine.seen[0].params.structured_outputs


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": []}},
            {"structural_tag": {"triggers": ["<"], "structures": []}},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            {"json_object": True, "disable_any_whitespace": False},
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            {"regex": "a"},
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            {"json_object": True, "disable_any_whitespace": True},
        ),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
                "structured_outputs": {"json": {"type": "null"}, "whitespace_pattern": " ?"},
            },
            {"json": SCHEMA, "whitespace_pattern": " ?"},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_fields_become_a_constraint(path, fields, expected):
    constraint = constraint_of(path, fields)
    assert constraint == (None if expected is None else StructuredOutputs(**expected))


def test_a_schema_keeps_the_order_of_its_properties():
    constraint = constraint_of(CHAT, {"structured_outputs": {"json": SCHEMA}})
    assert constraint is not None
    assert list(constraint.json["properties"]) == ["b", "a"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
        (
            {"structured_outputs": {"choice": ["a"], "regex": "b"}},
            "structured_outputs",
            "exactly one of json, regex",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one text"),
        ({"structured_outputs": {"json": "{no"}}, "structured_outputs.json", "must be JSON"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "a JSON object"),
        ({"structured_outputs": {"regex": 3}}, "body.structured_outputs.regex", "Expected `str"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex", "NUL"),
        ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar", "not empty"),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs.json_object",
            "must be true",
        ),
        ({"guided_json": "{no"}, "guided_json", "must be JSON"),
        ({"guided_choice": "ab"}, "body.guided_choice", "Expected `array"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice",
            "one of guided_regex and guided_choice",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "one of response_format and structured_outputs",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "must have `json_schema`",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            "must have `json_schema`",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "must be an object whose"),
        ({"response_format": {}}, "response_format", "must be an object whose"),
    ],
)
def test_what_makes_no_sense_names_its_field(path, fields, param, reason):
    error = error_of(path, {**BODIES[path], **fields})
    assert error["param"] == param
    assert reason in error["message"]


def test_what_the_engine_cannot_compile_is_the_client_s_error():
    refusal = ParameterError("response_format", {"type": "x"}, "cannot be compiled: Invalid type")
    error = error_of(CHAT, BODIES[CHAT], FakeEngine(refuse=refusal))
    assert error["param"] == "response_format"
    assert "Invalid type" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_an_output_that_cannot_go_on_is_the_client_s_error(fields, param):
    engine = FakeEngine(last_finish_reason="error", last_stop_reason="no token is allowed")
    error = error_of(CHAT, {**BODIES[CHAT], **fields}, engine)
    assert error["param"] == param
    assert "cannot be continued within its constraint: no token is allowed" in error["message"]
