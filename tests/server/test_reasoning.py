"""Reasoning told apart from the answer, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.server.reasoning import (
    REASONING_FORMATS,
    MarkedReasoning,
    ReasoningParser,
    detect_reasoning_format,
)
from tests.server.tool_parsers.reading import PLACES, Message, cut, read, texts_of

QWEN, DEEPSEEK = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]
ASKED = "<|im_start|>user\n<think> about it<|im_end|>\n<|im_start|>assistant\n"

EXAMPLES = [
    (QWEN, ASKED, "<think>\nHm.\n</think>\n\nYes.", Message("\n\nYes.", (), "\nHm.\n")),
    (QWEN, ASKED, "\n<think>Hm.</think>", Message("", (), "Hm.")),
    (QWEN, ASKED, "<think>Hm", Message("", (), "Hm")),
    (QWEN, ASKED, "<think>Hm</thi", Message("", (), "Hm</thi")),
    (QWEN, ASKED, "Yes. <think>x</think>", Message("Yes. <think>x</think>")),
    (QWEN, ASKED, "<th", Message("<th")),
    (QWEN, ASKED + "<think>\n", "Hm.\n</think>Yes.", Message("Yes.", (), "Hm.\n")),
    (QWEN, ASKED + "<think>\n\n</think>\n\n", "<think>no", Message("<think>no")),
    (DEEPSEEK, ASKED, "Hm.</think>Yes.</think>", Message("Yes.</think>", (), "Hm.")),
    (DEEPSEEK, ASKED, "<think>Hm.</think>Yes.", Message("Yes.", (), "Hm.")),
    (DEEPSEEK, ASKED, "No end.", Message("", (), "No end.")),
    (DEEPSEEK, None, "Hm.</think>Yes.", Message("Yes.", (), "Hm.")),
    (REASONING_FORMATS["mistral"], "", "[THINK]a[/THINK]b", Message("b", (), "a")),
]


def parser(format: MarkedReasoning, prompt: str | None) -> ReasoningParser:
    return ReasoningParser(format, format.state_after(prompt))


@pytest.mark.parametrize(("format", "prompt", "text", "message"), EXAMPLES)
def test_examples_cut_anywhere(format, prompt, text, message):
    assert read(parser(format, prompt), text) == message
    for place in range(len(text) + 1):
        assert read(parser(format, prompt), cut(text, [place])) == message


def test_continued_message_is_reasoning_where_it_was_left_open():
    for prompt, message in [
        ("<think>So far", Message("b", (), "a")),
        ("<think>x</think>So far", Message("a</think>b")),
        ("So far", Message("a</think>b")),
    ]:
        state = DEEPSEEK.state_after(prompt, is_continued=True)
        assert read(ReasoningParser(DEEPSEEK, state), ["a</think>b"]) == message


@pytest.mark.parametrize("format", [QWEN, DEEPSEEK])
@given(data=st.data())
def test_pieces_say_what_the_whole_says(format, data):
    text = data.draw(texts_of(["<think>", "</think>", "<", "think", " ", "text"]))
    whole = read(parser(format, ASKED), [text])
    assert read(parser(format, ASKED), text) == whole
    assert read(parser(format, ASKED), cut(text, data.draw(PLACES))) == whole


def test_template_tells_the_format():
    assert detect_reasoning_format("x</think>y") == "qwen3"
    assert detect_reasoning_format("[THINK]") == "mistral"
    assert detect_reasoning_format("plain") is None
