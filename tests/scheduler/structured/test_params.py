"""A constraint says one thing, and says it completely."""

import pytest

from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.scheduler.structured.params import StructuredOutputs


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, r"must have exactly one of json, .*, got \[\]"),
        ({"regex": "a", "json_object": True}, r"exactly one .*\['regex', 'json_object'\]"),
        ({"json": "{"}, r"structured_outputs\.json must be JSON, got '\{'"),
        ({"json": "[" * 100_000}, r"json must be JSON"),
        ({"json": [1]}, r"json must be a JSON object"),
        ({"json": "3"}, r"json must be a JSON object"),
        ({"structural_tag": "true"}, r"structural_tag must be a JSON object"),
        ({"regex": ""}, r"regex must be a text that is not empty"),
        ({"regex": 3}, r"regex must be a text that is not empty"),
        ({"grammar": "a\0b"}, r"grammar must not contain NUL"),
        ({"json_object": True, "whitespace_pattern": " \n"}, r"whitespace_pattern must be a text"),
        ({"choice": "ab"}, r"choice must be a list of at least one text"),
        ({"choice": ["a", ""]}, r"none of them empty"),
        ({"json_object": 1}, r"json_object must be true"),
        ({"regex": "a", "disable_any_whitespace": 1}, r"disable_any_whitespace must be true or"),
        ({"regex": "a", "disable_additional_properties": 1}, r"properties must be true or"),
        ({"regex": "", "source": "guided_regex"}, r"^guided_regex must be a text"),
        ({"regex": "a", "schemas": {"b": {}}}, r"schemas must stand beside a grammar"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, match):
    with pytest.raises(ParameterError, match=match):
        StructuredOutputs(**fields)


def test_schemas_may_be_given_as_text():
    assert StructuredOutputs(json='{"type": "null"}').json == {"type": "null"}
    assert StructuredOutputs(json="true").json is True


def test_who_asked_is_no_part_of_what_is_asked():
    assert StructuredOutputs(regex="a", source="x") == StructuredOutputs(regex="a")


def test_it_is_a_sampling_parameter():
    constraint = StructuredOutputs(choice=["a"])
    assert constraint.kind == "choice"
    assert SamplingParams(structured_outputs=constraint).structured_outputs is constraint


@pytest.mark.parametrize("name", ["compile_timeout", "max_size", "max_depth", "cache_size"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be above 0"):
        StructuredOutputsConfig(**{name: 0})
