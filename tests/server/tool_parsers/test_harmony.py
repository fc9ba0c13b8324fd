"""gpt-oss's channels; the examples are those of the format's own documentation."""

import pytest
from hypothesis import given

from paged.server.reasoning import HARMONY_REASONING, REASONING_FORMATS, ReasoningState
from paged.server.tool_parsers.formats import HARMONY, TOOL_FORMATS
from paged.server.tool_parsers.grammar import Function, call_grammar
from paged.server.tool_parsers.harmony import MARKS, HarmonyParser
from tests.server.tool_parsers.reading import PLACES, Message, cut, read, texts_of

THOUGHT = "Need to use function get_weather."
LOCATION = '{"location":"San Francisco"}'
CALL = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{LOCATION}<|call|>"
)
WEATHER = ("get_weather", LOCATION)

EXAMPLES = [
    (
        "<|channel|>analysis<|message|>2 + 2 = 4.<|end|><|start|>assistant<|channel|>final"
        "<|message|>2 + 2 = 4.<|return|>",
        Message("2 + 2 = 4.", (), "2 + 2 = 4."),
    ),
    (CALL, Message("", (WEATHER,), THOUGHT)),
    (CALL.removesuffix("<|call|>"), Message("", (WEATHER,), THOUGHT)),
    # The recipient may stand with the role, and a preamble is for the user.
    (
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions."
        f"get_weather<|channel|>commentary json<|message|>{LOCATION}",
        Message("I will look.", (WEATHER,)),
    ),
    ("<|channel|>commentary to=functions.f<|message|>", Message("", (("f", "{}"),))),
    ('<|channel|>commentary to=functions.f<|message|>{"a": ', Message("", (("f", '{"a": '),))),
    (
        "<|channel|>commentary to=functions.f<|message|>{}\n and more <|end|>",
        Message("\n and more ", (("f", "{}"),)),
    ),
    ("<|channel|>commentary to=functions.f<|message|>{} \n<|end|>", Message("", (("f", "{}"),))),
    ("<|channel|>analysis<|message|>Hm", Message("", (), "Hm")),
    ("<|channel|>analysis<|message|>Hm<|end|><|start|>assis", Message("", (), "Hm")),
    ("goes on<|return|>", Message("goes on")),
    ("a<|end|><|start|>" + "x" * 300, Message("a<|start|>" + "x" * 300)),
    ("<|channel|>" + "x" * 300, Message("<|channel|>" + "x" * 300)),
]


@pytest.mark.parametrize(("text", "message"), EXAMPLES)
def test_examples_cut_anywhere(text, message):
    for pieces in ([text], text, *(cut(text, [place]) for place in range(len(text)))):
        assert read(HarmonyParser(reads_calls=True), pieces) == message


def test_calls_that_nobody_reads_are_content():
    assert read(HarmonyParser(reads_calls=False), [CALL]) == Message(LOCATION, (), THOUGHT)


@given(texts_of([*MARKS, "assistant", "analysis", " to=functions.f", "{}", LOCATION]), PLACES)
def test_pieces_say_what_the_whole_says(text, places):
    whole = read(HarmonyParser(reads_calls=True), [text])
    assert read(HarmonyParser(reads_calls=True), text) == whole
    assert read(HarmonyParser(reads_calls=True), cut(text, places)) == whole


def test_grammar_of_a_call_is_what_the_parser_reads():
    form = TOOL_FORMATS[HARMONY].forms[""]
    ids = {mark: 200_000 + i for i, mark in enumerate(MARKS)}
    rules = REASONING_FORMATS[HARMONY_REASONING].rules(
        ReasoningState.UNDECIDED, ids, before_calls=True
    )
    grammar = call_grammar(
        form, [Function("f", {"type": "object"})], is_single=True, mark_ids=ids, prefix=rules
    )
    assert 'call_0: <[200001]> "commentary to=functions.f " <[200003]> "json" <[200002]>' in grammar
    assert 'prefix: (<[200001]> "analysis" <[200002]> thought <[200000]> "assistant")?' in grammar
