"""Grammars of calls, put to the library that enforces them."""

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.scheduler.structured.grammar_text import constraint_source, grammar_text
from paged.scheduler.structured.params import StructuredOutputs
from paged.server.constraints import after_reasoning
from paged.server.errors import ApiError
from paged.server.reasoning import HARMONY_REASONING, REASONING_FORMATS, ReasoningState
from paged.server.tool_parsers import harmony
from paged.server.tool_parsers.formats import HARMONY, JSON_LIST, TOOL_FORMATS
from paged.server.tool_parsers.grammar import (
    Function,
    argument_schemas,
    call_grammar,
    free_text_grammar,
)
from paged.server.tool_parsers.harmony import HarmonyParser
from tests.server.tool_parsers.reading import read

# References and slashes: a schema stays a document of its own within the grammar.
F = Function(
    "f",
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x/y"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"x/y": {"type": "integer"}, "x": {"y": {"type": "integer"}}},
    },
)
G = Function('g"', {"type": "object", "properties": {}, "additionalProperties": False})
CALLS = (("f", '{"a": 1}'), ('g"', "{}"))
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
EOS = "<eos>"


@cache
def bytes_tokenizer(marks: tuple[str, ...]) -> Tokenizer:
    """One token per byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(m, special="[" in m, normalized=False) for m in marks]
    tokenizer.add_tokens(tokens)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


@cache
def library_tokenizer(marks: tuple[str, ...]) -> LLTokenizer:
    tokenizer = bytes_tokenizer(marks)
    size = tokenizer.get_vocab_size()
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[tokenizer.token_to_id(EOS)])


def ids_of(marks: tuple[str, ...]) -> dict[str, int]:
    return {mark: bytes_tokenizer(marks).token_to_id(mark) for mark in marks}


def accepts(grammar: str | StructuredOutputs, text: str, marks: tuple[str, ...]) -> bool:
    """Whether a text may be generated as a whole; True for nothing if the grammar is wrong.

    The text of a grammar is one of calls of F, and of G where it has that, too.
    """
    if isinstance(grammar, str):
        schemas = argument_schemas([F, G] if "call_1" in grammar else [F])
        grammar = StructuredOutputs(grammar=grammar, schemas=schemas, spaces_json=True)
    config = StructuredOutputsConfig()
    constraint_source(grammar, config)
    source = grammar_text(grammar, config)
    matcher = LLMatcher(library_tokenizer(marks), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = bytes_tokenizer(marks).encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


FORMS = {
    "hermes": (
        TOOL_FORMATS["hermes"],
        "",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g\\"", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (
        TOOL_FORMATS["llama3_json"],
        "",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g\\"", "parameters": {}}',
    ),
    "mistral": (
        TOOL_FORMATS["mistral"],
        "",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g\\"", "arguments": {}}]',
    ),
    "json_list": (
        JSON_LIST,
        "",
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g\\"", "parameters": {}}]',
    ),
}


@pytest.mark.parametrize("marks", [(), MARKS], ids=["bytes", "tokens"])
@pytest.mark.parametrize("name", FORMS)
def test_calls_and_nothing_but_calls(name, marks):
    format, key, text = FORMS[name]
    several = call_grammar(format.forms[key], [F, G], is_single=False, mark_ids=ids_of(marks))
    single = call_grammar(format.forms[key], [F, G], is_single=True, mark_ids=ids_of(marks))
    assert accepts(several, text, marks)
    assert not accepts(single, text, marks)
    for wrong in ("", "Text. " + text, text + " text", text.replace("1", '"1"'), text[:-2]):
        assert not accepts(several, wrong, marks)
    assert accepts(several, text + "\n", marks) == (name == "hermes")
    # What the grammar demands, the format's own parser reads.
    assert read(format.make_parser(["f", 'g"']), text).calls == CALLS


@pytest.mark.parametrize("marks", [(), MARKS], ids=["bytes", "tokens"])
def test_mistral_s_newer_form(marks):
    form = TOOL_FORMATS["mistral"].forms["[ARGS]"]
    grammar = call_grammar(form, [F], is_single=False, mark_ids=ids_of(marks))
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}'
    assert accepts(grammar, text, marks)
    assert accepts(grammar, text + text, marks)
    assert not accepts(grammar, text.replace("1", "x"), marks)


@pytest.mark.parametrize("marks", [(), MARKS], ids=["bytes", "tokens"])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_free_text_in_which_calls_are_right(name, marks):
    format, key, text = FORMS[name]
    grammar = free_text_grammar(format.forms[key], [F, G], mark_ids=ids_of(marks))
    for right in ("", "a < b [TOOL\n", text, f"Look: {text}", f"{text} So."):
        assert accepts(grammar, right, marks)
    for wrong in (text.replace("1", '"1"'), text.replace("f", "h")):
        assert not accepts(grammar, wrong, marks)


def test_answer_without_calls_where_no_mark_tells_it_from_one():
    format, key, text = FORMS["llama3_json"]
    grammar = free_text_grammar(format.forms[key], [F, G], mark_ids={})
    for right in ("", "\n ", "Text {with} braces.", text):
        assert accepts(grammar, right, ())
    for wrong in (text.replace("1", '"1"'), ' {"answer": 1}', text + " So."):
        assert not accepts(grammar, wrong, ())


def test_gpt_oss_answers_or_calls():
    marks = harmony.MARKS
    form = TOOL_FORMATS[HARMONY].forms[""]
    rules = REASONING_FORMATS[HARMONY_REASONING].rules(
        ReasoningState.UNDECIDED, ids_of(marks), before_calls=True
    )
    grammar = free_text_grammar(form, [F], mark_ids=ids_of(marks), prefix=rules)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    for first in ("", thought):
        assert accepts(grammar, first + call, marks)
        assert accepts(grammar, first + "<|channel|>final<|message|>Yes.", marks)
        assert not accepts(grammar, first + call.replace("1", "x"), marks)
    (message,) = read(HarmonyParser(reads_calls=True), thought + call).calls
    assert message == ("f", '{"a": 1}')


@pytest.mark.parametrize("marks", [(), MARKS], ids=["bytes", "tokens"])
@pytest.mark.parametrize(
    ("outputs", "right", "wrong"),
    [
        (StructuredOutputs(json={"type": "integer"}), "12", "x"),
        (StructuredOutputs(json_object=True), '{"a": 1}', "[]"),
        (StructuredOutputs(choice=["a/b", 'c"']), 'c"', "c"),
        (StructuredOutputs(regex=r"a/b\/[0-9]{2}"), "a/b/12", "a/b/1"),
    ],
)
def test_constraint_begins_where_reasoning_ends(outputs, right, wrong, marks):
    format = REASONING_FORMATS["qwen3"]
    for state, optional in [
        (ReasoningState.UNDECIDED, True),
        (ReasoningState.IMPLIED, False),
        (ReasoningState.REASONING, False),
    ]:
        grammar = after_reasoning(outputs, format.rules(state, ids_of(marks)))
        for thought in ("<think>\nHm.\n</think>\n\n", "<think></think>"):
            assert accepts(grammar, thought + right, marks)
            assert not accepts(grammar, thought + wrong, marks)
        assert accepts(grammar, right, marks) == optional
        assert accepts(grammar, "Hm.</think>" + right, marks) != optional
    assert format.rules(ReasoningState.ANSWER, {}) == []


def test_grammar_of_its_own_cannot_follow_on_reasoning():
    with pytest.raises(ApiError, match="cannot follow on reasoning"):
        after_reasoning(StructuredOutputs(grammar='start: "a"'), ["prefix: "])


def test_calls_may_follow_on_reasoning():
    rules = REASONING_FORMATS["deepseek_r1"].rules(ReasoningState.IMPLIED, ids_of(MARKS))
    form = TOOL_FORMATS["hermes"].forms[""]
    options = {"mark_ids": ids_of(MARKS), "prefix": rules}
    text = FORMS["hermes"][2]
    for grammar in (
        call_grammar(form, [F, G], is_single=False, **options),
        free_text_grammar(form, [F, G], **options),
    ):
        assert accepts(grammar, "Hm.</think>\n\n" + text, MARKS)
        assert not accepts(grammar, text, MARKS)


def test_parameters_are_spaced_as_templates_space_them():
    form = JSON_LIST.forms[""]
    grammar = call_grammar(form, [F], is_single=True, mark_ids={})
    call = '[{"name": "f", "parameters": %s}]'
    assert accepts(grammar, call % json.dumps({"a": 1}), ())
    assert not accepts(grammar, call % '{ "a": 1}', ())
