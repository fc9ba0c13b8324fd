"""JSON in calls and behind reasoning comes to an end, whatever the model wants to say."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from paged.scheduler.params import ParameterError
from paged.scheduler.structured.grammar_constraint import GrammarConstraint
from paged.scheduler.structured.json_numbers import MAX_NUMBER_LENGTH
from paged.scheduler.structured.params import StructuredOutputs
from paged.server.constraints import after_reasoning
from paged.server.reasoning import REASONING_FORMATS, ReasoningState
from paged.server.tool_parsers.formats import JSON_LIST, TOOL_FORMATS
from paged.server.tool_parsers.grammar import (
    CallForm,
    Function,
    argument_schemas,
    call_grammar,
    free_text_grammar,
)
from tests.scheduler.structured.grammars import EOS, allowed, make_compiler

MAX_BEFORE_MATCH = 128
FORMS = {
    "hermes": TOOL_FORMATS["hermes"].forms[""],
    "llama3_json": TOOL_FORMATS["llama3_json"].forms[""],
    "mistral": TOOL_FORMATS["mistral"].forms[""],
    "mistral_args": TOOL_FORMATS["mistral"].forms["[ARGS]"],
    "json_list": JSON_LIST.forms[""],
}
THINK = REASONING_FORMATS["qwen3"].rules(ReasoningState.UNDECIDED, {})
# An odd number of quotes, and digits that are nobody's number.
THOUGHT = '<think>He said "' + "7" * 80 + "</think>\n\n"


@pytest.fixture(scope="module")
def compiler():
    made = make_compiler()
    yield made
    made.close()


def with_schemas(grammar: str, functions: Sequence[Function]) -> StructuredOutputs:
    schemas = argument_schemas(functions)
    return StructuredOutputs(grammar=grammar, schemas=schemas, spaces_json=True)


def function(schema: dict[str, Any]) -> Function:
    return Function("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]})


def head(form: CallForm) -> str:
    """What precedes the value of `a`."""
    return f'{form.begin}{form.before_name}f{form.after_name}{{"a": '


def fed(state: GrammarConstraint, text: str) -> GrammarConstraint:
    """Return the state behind a text that the masks allow."""
    for byte in text.encode():
        assert byte in allowed(state), (chr(byte), text)
        assert state.accept(byte)
    return state


def length_of(state: GrammarConstraint, byte: int, limit: int = 400) -> int:
    """Return how often a byte can be repeated."""
    for count in range(limit):
        if byte not in allowed(state):
            return count
        state.accept(byte)
    return limit


NUMBERS = [
    ({"type": "number"}, "", MAX_NUMBER_LENGTH),
    ({"type": "number"}, "3.", MAX_NUMBER_LENGTH - 2),
    ({"type": "number", "minimum": 0, "maximum": 9}, "3.", MAX_NUMBER_LENGTH - 2),
    ({"type": "number"}, "1e", MAX_NUMBER_LENGTH - 2),
    ({"type": "integer"}, "-", MAX_NUMBER_LENGTH - 1),
    ({"type": "array", "items": {"type": "integer"}}, "[1, ", MAX_NUMBER_LENGTH),
    ({}, "", MAX_NUMBER_LENGTH),
    # What only goes on is not stopped, and a string is no number.
    ({"const": 10**40}, "1", 0),
    ({"type": "string", "minLength": 60, "maxLength": 60}, '"', 60),
    ({"type": "string", "pattern": "^[0-9]{50}$"}, '"', 50),
    # Of what precedes a match that may be anywhere.
    ({"type": "string", "pattern": "x"}, '"', MAX_BEFORE_MATCH),
]


@pytest.mark.parametrize("prefix", ["", THOUGHT], ids=["at once", "after reasoning"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("schema", "begun", "expected"), NUMBERS, ids=str)
def test_a_value_of_digits_ends_in_a_call(compiler, schema, begun, expected, name, prefix):
    form, functions = FORMS[name], [function(schema)]
    rules = THINK if prefix else []
    grammar = call_grammar(form, functions, is_single=True, mark_ids={}, prefix=rules)
    state = compiler.compile(with_schemas(grammar, functions)).start(jumps=False)
    fed(state, prefix + head(form) + begun)
    assert length_of(state, ord("7")) == expected


@pytest.mark.parametrize(("schema", "begun", "expected"), NUMBERS, ids=str)
def test_a_value_of_digits_ends_in_a_strict_call_after_text(compiler, schema, begun, expected):
    form, functions = FORMS["hermes"], [function(schema)]
    grammar = free_text_grammar(form, functions, mark_ids={})
    state = compiler.compile(with_schemas(grammar, functions)).start(jumps=False)
    assert length_of(state, ord("7"), 100) == 100
    fed(state, ' "' + head(form) + begun)
    assert length_of(state, ord("7")) == expected


@pytest.mark.parametrize(("schema", "begun", "expected"), NUMBERS, ids=str)
def test_a_value_of_digits_ends_after_reasoning(compiler, schema, begun, expected):
    outputs = after_reasoning(StructuredOutputs(json=schema), THINK)
    state = compiler.compile(outputs).start(jumps=False)
    fed(state, THOUGHT + begun)
    assert length_of(state, ord("7")) == expected


def test_a_value_of_digits_ends_in_a_structural_tag(compiler):
    structure = {"begin": "<f>", "schema": function({"type": "number"}).parameters, "end": "</f>"}
    tag = {"triggers": ["<f>"], "structures": [structure]}
    state = compiler.compile(StructuredOutputs(structural_tag=tag)).start(jumps=False)
    assert length_of(state, ord("7"), 100) == 100
    fed(state, ' "<f>{"a":')
    assert length_of(state, ord("7")) == MAX_NUMBER_LENGTH
    fed(state, "}</f>")
    assert length_of(state, ord("7"), 100) == 100


@pytest.mark.parametrize("reasons", [False, True])
def test_objects_of_calls_are_closed_unless_they_say_otherwise(compiler, reasons):
    for extra, is_open in [({}, False), ({"additionalProperties": True}, True)]:
        schema = {**function({"type": "null"}).parameters, **extra}
        if reasons:
            outputs, before = after_reasoning(StructuredOutputs(json=schema), THINK), '{"a": '
        else:
            functions, form = [Function("f", schema)], FORMS["hermes"]
            grammar = call_grammar(form, functions, is_single=True, mark_ids={})
            outputs, before = with_schemas(grammar, functions), head(form)
        state = fed(compiler.compile(outputs).start(jumps=False), before + "null")
        assert (ord(",") in allowed(state)) == is_open


def test_a_schema_that_narrowing_contradicts_is_taken_as_it_is(compiler):
    """In a call, as in a response format: what cannot be narrowed is not refused."""
    schema = {**function({"const": 1}).parameters, "minProperties": 2}
    functions, form = [Function("f", schema)], FORMS["hermes"]
    grammar = call_grammar(form, functions, is_single=True, mark_ids={})
    state = compiler.compile(with_schemas(grammar, functions)).start(jumps=False)
    fed(state, head(form) + '1, "b": 2}}\n</tool_call>')
    assert EOS in allowed(state)


def test_white_space_behind_reasoning_is_what_the_request_says(compiler):
    for options, text in [
        ({}, '{"a": 1}'),
        ({"disable_any_whitespace": False}, '{ "a" : 1}'),
        ({"whitespace_pattern": "_?"}, '{_"a":_1}'),
    ]:
        schema = function({"const": 1}).parameters
        outputs = after_reasoning(StructuredOutputs(json=schema, **options), THINK)
        state = fed(compiler.compile(outputs).start(jumps=False), text)
        assert EOS in allowed(state) or state.is_over
        assert json.loads(text.replace("_", "")) == {"a": 1}


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        (StructuredOutputs(json={"type": "no"}), r"^structured_outputs\.json .*'type': 'no'"),
        (StructuredOutputs(regex="("), r"^structured_outputs\.regex cannot be compiled"),
        (StructuredOutputs(json={"type": "no"}, source="response_format"), r"^response_format can"),
        (StructuredOutputs(json=False), r"^structured_outputs\.json allows no value"),
    ],
    ids=str,
)
def test_what_cannot_follow_on_reasoning_is_named_as_it_was_sent(compiler, outputs, match):
    with pytest.raises(ParameterError, match=match):
        compiler.compile(after_reasoning(outputs, THINK))
