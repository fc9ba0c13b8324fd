"""Tool calls as models write them, whole and in pieces."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.server.tool_parsers.formats import (
    JSON_LIST,
    TOOL_FORMATS,
    ToolFormat,
    detect_tool_format,
)
from tests.server.tool_parsers.reading import PLACES, Message, cut, read, texts_of

NAMES = ("get_weather", "add", "f")
PARSED = {name: TOOL_FORMATS[name] for name in ("hermes", "llama3_json", "mistral", "pythonic")} | {
    "json_list": JSON_LIST
}

WEATHER = ("get_weather", '{"city": "Paris", "unit": "celsius"}')
ADD = ("add", '{"a": 2, "b": 3}')

# (format, text, what it says)
EXAMPLES = [
    ("hermes", "Just text.", Message("Just text.")),
    ("hermes", "  spaced \n", Message("  spaced \n")),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n'
        "</tool_call>",
        Message(calls=(WEATHER,)),
    ),
    (
        "hermes",
        'Let me check.\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris", "unit": "celsius"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n',
        Message("Let me check.", (WEATHER, ADD)),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', Message(calls=(("f", "{}"),))),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', Message(calls=(("f", "{}"),))),
    ("hermes", '<tool_call>{"name":"f","arguments":null}', Message(calls=(("f", "{}"),))),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, "}"]}, "name": "f"}</tool_call>',
        Message(calls=(("f", '{"a": [1, "}"]}'),)),
    ),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}', Message(calls=(("g", "{}"),))),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>',
        Message(calls=(("f", '{"code": "a\\nb"}'),)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done.',
        Message(" Done.", (("f", "{}"),)),
    ),
    # Without its marks it is a call if it names a function, as Qwen2.5-Coder writes it.
    (
        "hermes",
        '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
        Message(calls=(WEATHER,)),
    ),
    (
        "hermes",
        '\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n{"name": "f"}\nDone.',
        Message("\nDone.", (ADD, ("f", "{}"))),
    ),
    (
        "hermes",
        '```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```',
        Message(calls=(ADD,)),
    ),
    (
        "hermes",
        '```json\n{"name": "f"}\n```\n\n```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n'
        '```\n<tool_call>{"name": "f"}</tool_call>```',
        Message("```", (("f", "{}"), ADD, ("f", "{}"))),
    ),
    ("hermes", '{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', Message(calls=(ADD,))),
    ("hermes", '{"name": "Bob", "age": 3}', Message('{"name": "Bob", "age": 3}')),
    ("hermes", '{"name": "g", "arguments": {}}', Message('{"name": "g", "arguments": {}}')),
    ("hermes", '```json\n{"name": "Bob"}\n```', Message('```json\n{"name": "Bob"}\n```')),
    ("hermes", '```json\n[{"name": "f"}]', Message('```json\n[{"name": "f"}]')),
    ("hermes", "```json", Message("```json")),
    ("hermes", "``", Message("``")),
    ("hermes", '```\n{"name": "f"}\n```', Message('```\n{"name": "f"}\n```')),
    ("hermes", 'So: {"name": "f"}', Message('So: {"name": "f"}')),
    # Malformed before anything was said of a call: content, as it stands.
    ("hermes", "a <tool_call> b", Message("a <tool_call> b")),
    (
        "hermes",
        "<tool_call>{'name': 'f'}</tool_call>",
        Message("<tool_call>{'name': 'f'}</tool_call>"),
    ),
    ("hermes", '<tool_call>\n{"name": "f", "argum', Message('<tool_call>\n{"name": "f", "argum')),
    ("hermes", '<tool_call>{"name": 5, "a', Message('<tool_call>{"name": 5, "a')),
    ("hermes", '<tool_call>{"name": "\\ud800"}', Message('<tool_call>{"name": "\\ud800"}')),
    ("hermes", "<tool_call>{}", Message("<tool_call>{}")),
    ("hermes", "x <tool_ca", Message("x <tool_ca")),
    (
        "hermes",
        'Use <tool_call> so: <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        Message("Use <tool_call> so:", (("f", "{}"),)),
    ),
    # Malformed or cut behind it: the call stands with what there was.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', Message("", (("f", '{"a": "b'),))),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": b}}',
        Message("b}}", (("f", '{"a": '),)),
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}',
        Message(calls=(WEATHER,)),
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "arguments": {"a": 2, "b": 3}}; {"type": "function", '
        '"name": "f", "parameters": {}}',
        Message(calls=(ADD, ("f", "{}"))),
    ),
    (
        "llama3_json",
        '{"name": "Bob", "parameters": {}}',
        Message('{"name": "Bob", "parameters": {}}'),
    ),
    ("llama3_json", '{"answer": 42}', Message('{"answer": 42}')),
    ("llama3_json", 'Here: {"name": "f"}', Message('Here: {"name": "f"}')),
    ("llama3_json", '{"name": "f"}; bye', Message("; bye", (("f", "{}"),))),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}, '
        '{"name": "add", "arguments": {"a": 2, "b": 3}}]',
        Message(calls=(WEATHER, ADD)),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"arguments": {"a": 2, "b": 3}, "name": "add"}]',
        Message(calls=(ADD,)),
    ),
    (
        "mistral",
        'Sure.[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{}',
        Message("Sure.", (ADD, ("f", "{}"))),
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 2, "b": 3}', Message(calls=(ADD,))),
    ("mistral", "[TOOL_CALLS] are marks", Message("[TOOL_CALLS] are marks")),
    ("mistral", "[TOOL_CALLS]" + "a" * 300, Message("[TOOL_CALLS]" + "a" * 300)),
    ("mistral", "[TOOL_CALLS]f[WHAT]{}", Message("[TOOL_CALLS]f[WHAT]{}")),
    (
        "pythonic",
        "[get_weather(city='Paris', unit=\"celsius\"), add(a=2, b=3)]",
        Message(calls=(WEATHER, ADD)),
    ),
    ("pythonic", "[f()]", Message(calls=(("f", "{}"),))),
    (
        "pythonic",
        "<|python_start|>[f(a=[1, -2.5], b={'c': True, 'd': None}, e=(false,))]<|python_end|>",
        Message(calls=(("f", '{"a": [1, -2.5], "b": {"c": true, "d": null}, "e": [false]}'),)),
    ),
    ("pythonic", "x = [f(a=1)]", Message("x = [f(a=1)]")),
    ("pythonic", "[1, 2, 3]", Message("[1, 2, 3]")),
    ("pythonic", "[unknown(a=1)]", Message("[unknown(a=1)]")),
    ("pythonic", "[f(a='x)]', b=\"it's\")]", Message(calls=(("f", '{"a": "x)]", "b": "it\'s"}'),))),
    ("pythonic", "[f(a=1, b=open('x'))]", Message("open('x'))]", (("f", '{"a": 1'),))),
    ("pythonic", "[f(a='\\ud800')]", Message("'\\ud800')]", (("f", "{"),))),
    ("pythonic", "[f(a=1e999)]", Message("1e999)]", (("f", "{"),))),
    ("pythonic", "[f(a={1: 2})]", Message("{1: 2})]", (("f", "{"),))),
    ("pythonic", "[f(a='cut", Message("'cut", (("f", "{"),))),
    ("pythonic", "[f(a=1, b", Message("b", (("f", '{"a": 1'),))),
    ("json_list", '[{"name": "add", "parameters": {"a": 2, "b": 3}}]', Message(calls=(ADD,))),
    ("json_list", "[1]", Message("[1]")),
]


def parse(format: ToolFormat, pieces) -> Message:
    return read(format.make_parser(NAMES), pieces)


@pytest.mark.parametrize(("name", "text", "message"), EXAMPLES)
def test_examples_whole_and_by_character_and_cut_anywhere_once(name, text, message):
    assert parse(PARSED[name], [text]) == message
    assert parse(PARSED[name], text) == message
    for place in range(len(text)):
        assert parse(PARSED[name], cut(text, [place])) == message


FRAGMENTS = {
    "hermes": [
        *("<tool_call>", "</tool_call>", "\n", "```json", "```"),
        '{"name": "f", "arguments": {"a": 1}}',
    ],
    "llama3_json": ["<|python_tag|>", ";", '{"name": "f", "parameters": {"a": 1}}', "{"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", "[", "]", ",", "{}", '{"name": "f"}'],
    "pythonic": ["[", "f(", "add(", "a=", "'x'", ",", ")", "]", "<|python_start|>", "{", "1"],
    "json_list": ["[", "]", ",", '{"name": "f", "parameters": {}}', '{"name": "'],
}
COMMON = ["{", "}", '"name"', ":", '"arguments": {"b": "c', '"', " ", "\n\n", "text", "\\"]


@pytest.mark.parametrize("name", PARSED)
@given(data=st.data())
def test_pieces_say_what_the_whole_says(name, data):
    text = data.draw(texts_of([*FRAGMENTS[name], *COMMON]))
    whole = parse(PARSED[name], [text])
    assert parse(PARSED[name], text) == whole
    assert parse(PARSED[name], cut(text, data.draw(PLACES))) == whole


@pytest.mark.parametrize("name", PARSED)
@given(st.text())
def test_text_without_marks_or_brackets_is_content(name, text):
    text = "".join(c for c in text if c not in "[{<") or "x"
    assert parse(PARSED[name], [text]) == Message(text)


ARGUMENTS = st.dictionaries(
    st.text(alphabet="abcdef_", min_size=1),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def written(name: str, calls: list[tuple[str, dict]]) -> str:
    """Calls as a model of the format would write them."""
    key = "arguments" if name in ("hermes", "mistral") else "parameters"
    objects = [
        json.dumps({"name": function, key: args}, ensure_ascii=False) for function, args in calls
    ]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "json_list":
            return f"[{', '.join(objects)}]"
    keywords = [
        f"{function}({', '.join(f'{key}={value!r}' for key, value in args.items())})"
        for function, args in calls
    ]
    return f"[{', '.join(keywords)}]"


@pytest.mark.parametrize("name", PARSED)
@given(calls=CALLS, places=PLACES)
def test_calls_come_back_as_they_were_meant(name, calls, places):
    message = parse(PARSED[name], cut(written(name, calls), places))
    assert not message.content
    assert [(function, json.loads(text)) for function, text in message.calls] == calls


@given(calls=CALLS, places=PLACES)
def test_mistral_s_newer_form_comes_back_too(calls, places):
    text = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)
    message = parse(PARSED["mistral"], cut(text, places))
    assert [(function, json.loads(text)) for function, text in message.calls] == calls


def test_arguments_come_while_the_model_writes_them():
    parser = PARSED["hermes"].make_parser(NAMES)
    parser.feed('<tool_call>\n{"name": "f", "arguments": {"a"')
    (event,) = parser.feed(': "long')
    assert event.text == ': "long'


def test_content_is_not_held_back_longer_than_needed():
    parser = PARSED["hermes"].make_parser(NAMES)
    (event,) = parser.feed("1 < 2 and <tool")
    assert event.text == "1 < 2 and"
    (event,) = parser.feed("box>")
    assert event.text == " <toolbox>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>" * 20_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 200_000),
        ("hermes", '<tool_call>{"' * 20_000),
        ("hermes", '{"name": "f"}```json' * 20_000),
        ("hermes", '```json{"name": "f"}```\n' * 20_000),
        ("llama3_json", "{" * 200_000),
        ("mistral", "[TOOL_CALLS]f" * 20_000),
        ("pythonic", "[f(a=" + "[" * 200_000),
        ("pythonic", "[f(a=" + "1+" * 100_000 + "1)]"),
        ("pythonic", "[f(a=" + "-" * 100_000 + "1)]"),
        ("json_list", "[" * 200_000),
    ],
)
def test_hostile_texts_take_linear_time(name, text):
    began = time.process_time()
    parse(PARSED[name], [text])
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": ...}', "hermes"),
        ('{% if tools %}<tool_call>\\n{\\"name\\": <n>, \\"arguments\\": <a>}', "hermes"),
        ("{% if tools %}<tool_call>\n<function=example>", None),
        ("{% for t in tools %}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": function name, "parameters": dictionary', "llama3_json"),
        ("{% if tools %}[func_name1(params_name1=params_value1, ...)", "pythonic"),
        ('{{ messages }}<tool_call> "arguments"', None),
        ("{% if tools %}something of its own", None),
    ],
)
def test_template_tells_the_format(template, name):
    assert detect_tool_format(template) == name
