"""Chat templates: prompts equal the goldens, and what templates can do is what they expect."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.models import chat_template
from paged.models.chat_template import ChatTemplate, ChatTemplateError
from paged.models.gguf_file import GGUFFile

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}({{ part.text }}){% endfor %}</>{% endfor %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options)


def variable(expression: str, **variables: Any) -> str:
    """What a template makes of one expression."""
    return render("{{ " + expression + " }}", **variables)


def test_golden_conversations(demo_model_path: Path, data_dir: Path):
    golden = json.loads((data_dir / "golden/smollm2-135m-instruct.json").read_text())
    metadata = GGUFFile(demo_model_path).metadata
    template = ChatTemplate(metadata["tokenizer.chat_template"], "<|im_start|>", "<|im_end|>")
    assert template.content_format == "string"
    for row in golden["conversations"]:
        rendered = template.render(
            row["messages"],
            add_generation_prompt=row["add_generation_prompt"],
            tools=row.get("tools"),
        )
        assert rendered == row["rendered"]


# --- the environment ---------------------------------------------------------------------------


def test_blocks_leave_no_blank_lines():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_tojson_keeps_characters_and_order():
    value = {"b": "é <&'", "a": [1]}
    assert variable("v | tojson", v=value) == """{"b": "é <&'", "a": [1]}"""
    assert variable("v | tojson(indent=1)", v=[1]) == "[\n 1\n]"
    assert variable("v | tojson(separators=(',', ':'), sort_keys=true)", v={"b": 1, "a": 2}) == (
        '{"a":2,"b":1}'
    )


def test_tokens_tools_and_further_variables_are_seen():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ tools[0].name }}{{ flag }}", "<s>")
    assert template.render([], tools=[{"name": "f"}], flag=1) == "<s>f1"
    assert template.render([], tools=[{"name": "f"}], bos_token="B") == "Bf"


def test_time_is_available():
    today = datetime.datetime.now().strftime("%Y")
    assert variable("strftime_now('%Y')") == today


def test_loop_controls_and_generation_marks_are_understood():
    source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "13"
    source = "{% generation %}{% set x = 1 %}a{{ x }}{% endgeneration %}b{{ x }}"
    assert render(source) == "a1b"


def test_unknown_variables_are_empty():
    assert variable("nothing") == ""
    assert variable("'x' if nothing is defined else 'y'") == "y"


# --- the messages ------------------------------------------------------------------------------


def test_parts_are_joined_by_newlines_for_a_template_of_text():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    assert render(CHATML, user(parts), add_generation_prompt=False) == "<user>a\nb\nc</>\n"


def test_text_becomes_a_part_for_a_template_of_parts():
    assert render(PARTS, user("a")) == "<user>(a)</>"
    assert render(PARTS, user(["a", {"type": "text", "text": "b"}])) == "<user>(a)(b)</>"


EACH_MESSAGE = "{% for m in messages %}BODY{% endfor %}"
EACH_PART = "{% for part in PARTS %}{% endfor %}"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("m.content", "openai"),
        ("m['content'] | list", "openai"),
        ("content", "openai"),  # as in a macro's parameter
        ("m.tool_calls", "string"),
        ("m[name]", "string"),
        ("m.content.split('x')", "string"),
    ],
)
def test_content_format_is_what_the_template_loops_over(parts: str, expected: str):
    source = EACH_MESSAGE.replace("BODY", EACH_PART.replace("PARTS", parts))
    assert ChatTemplate(source).content_format == expected


def test_content_format_follows_assignments():
    body = "{% set c = m['content'] %}" + EACH_PART.replace("PARTS", "c")
    assert ChatTemplate(EACH_MESSAGE.replace("BODY", body)).content_format == "openai"


def test_absent_content_is_empty_unless_the_template_asks_for_none():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert render("{{ messages[0].content }}|", call) == "|"
    assert render(PARTS, call) == "<assistant></>"
    source = "{{ 'none' if messages[0]['content'] is none }}"
    assert render(source, call) == "none"
    assert render(source, user("")) == ""


def test_fields_that_are_none_or_empty_calls_are_dropped():
    message = user("a") | {"name": None, "tool_calls": []}
    source = "{{ messages[0].keys() | list | sort }}"
    assert render(source, message) == "['content', 'role']"


def test_tool_call_arguments_become_objects():
    def call(arguments: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}

    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, call('{"city": "Köln"}')) == '{"city": "Köln"}'
    assert render(source, call({"city": "Köln"})) == '{"city": "Köln"}'
    assert render(source, call("")) == render(source, call(None)) == "{}"
    given = call('{"a": 1}')
    render(source, given)
    assert given == call('{"a": 1}'), "the caller's messages stay as they are"
    with pytest.raises(ChatTemplateError, match=r"messages\[0\].tool_calls has arguments that are"):
        render(source, call("{city"))


def test_developers_speak_as_the_system_where_the_template_does_not_know_them():
    messages = [
        {"role": "system", "content": "S"},
        user("U"),
        {"role": "developer", "content": [{"type": "text", "text": "D"}]},
    ]
    rendered = render(CHATML, *messages, add_generation_prompt=False)
    assert rendered == "<system>S\n\nD</>\n<user>U</>\n"
    assert render(PARTS, *messages) == "<system>(S\n\nD)</><user>(U)</>"
    knows = CHATML + "{# developer #}"
    assert "<developer>D</>" in render(knows, *messages)


def test_system_messages_stay_where_they_are_without_a_developer():
    messages = [user("U"), {"role": "system", "content": "S"}]
    assert render(CHATML, *messages, add_generation_prompt=False) == "<user>U</>\n<system>S</>\n"


# --- continuing the last message ---------------------------------------------------------------


def continued(source: str, text: Any) -> str:
    messages = [user("abc"), {"role": "assistant", "content": text}]
    return render(source, *messages, add_generation_prompt=False, continue_final_message=True)


@given(st.text("ab \n", min_size=0))
def test_prompt_ends_within_the_last_message(text: str):
    assert continued(CHATML, text) == f"<user>abc</>\n<assistant>{text}"


def test_stripped_messages_are_continued_stripped():
    source = CHATML.replace("m['content']", "m['content'] | trim")
    assert continued(source, " so far  ") == "<user>abc</>\n<assistant>so far"
    assert continued(source.replace("}}</>", "}} </>"), "a ") == "<user>abc </>\n<assistant>a"


def test_the_last_part_is_continued():
    assert continued(PARTS, ["x", "y"]) == "<user>(abc)</><assistant>(x)(y"


def test_a_message_that_the_template_changes_cannot_be_continued():
    for source in ("{{ messages[0].content }}", CHATML.replace("m['content']", "m['content'][2:]")):
        with pytest.raises(ChatTemplateError, match="does not keep the text of the last message"):
            continued(source, "abcdef")


def test_what_cannot_be_continued():
    with pytest.raises(ChatTemplateError, match="needs a last message with text"):
        continued(CHATML, None)
    with pytest.raises(ChatTemplateError, match="needs a last message with text"):
        render(CHATML, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(CHATML, user("a"), continue_final_message=True)


# --- errors ------------------------------------------------------------------------------------


def test_syntax_errors_name_the_line():
    with pytest.raises(ChatTemplateError, match=r"error in line 2: .*endfor"):
        ChatTemplate("x\n{% endfor %}")


def test_the_templates_own_words_are_kept_on_one_line():
    with pytest.raises(ChatTemplateError, match=r"^Chat template: Roles must alternate, please\.$"):
        variable("raise_exception('Roles must\n  alternate, please.')")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("nothing.at.all", "'nothing' is undefined"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("'a' + 1", "TypeError: can only concatenate str"),
        ("nothing | tojson", "TypeError: Object of type Undefined is not JSON serializable"),
        ("''.__class__.__mro__", "access to attribute '__class__' of 'str' object is unsafe"),
        ("messages.append(1)", "access to attribute 'append' of 'list' object is unsafe"),
        ("range(10**9) | list", "Range too big"),
    ],
)
def test_failures_and_escapes_are_errors(expression: str, message: str):
    with pytest.raises(ChatTemplateError, match=message):
        variable(expression)


def test_a_template_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"took longer than 0\.05 seconds"):
        render(loops)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "x"}, r"messages\[0\] has no role"),
        (user(5), r"messages\[0\].content must be text or a list of parts"),
        (user([{"type": "image_url", "image_url": {}}]), "part of type 'image_url'; only text"),
        (user([{"type": "text"}]), "part of type 'text'; its text must stand in 'text'"),
        (user([{"type": "refusal", "text": "a"}]), "'refusal'; its text must stand in 'refusal'"),
        (user([{"type": "input_image", "text": "a"}]), "part of type 'input_image'; only text"),
        (
            user([{"type": "thinking", "text": "a"}]),
            "'thinking'; its text must stand in 'thinking'",
        ),
        (user([{"type": ["text"], "text": "a"}]), r"part of type \['text'\]; only text"),
        (user([7]), "part of type None; only text"),
    ],
)
def test_messages_that_cannot_be_rendered(message: dict[str, Any], error: str):
    with pytest.raises(ChatTemplateError, match=error):
        render(CHATML, message)


def test_messages_cannot_be_replaced_by_a_variable():
    with pytest.raises(ChatTemplateError, match="'messages' cannot be set as a variable"):
        render(CHATML, user("a"), messages=[])
