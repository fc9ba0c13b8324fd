"""POST /v1/chat/completions: shapes, templates, roles and what is refused."""

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, error_of, ok, stream

ASK = [{"role": "user", "content": "Hi"}]
RENDERED = "[user]Hi\n[assistant]"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def prompt_of(body: dict, engine: FakeEngine | None = None, **settings) -> str | None:
    engine = engine or FakeEngine()
    ok(CHAT, {"max_tokens": 1, **body}, engine, **settings)
    return engine.seen[-1].prompt


def test_body_has_every_key_in_the_reference_s_order():
    body = ok(CHAT, {"messages": ASK, "max_tokens": 5})
    assert list(body) == [
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "prompt_text",
        "kv_transfer_params",
    ]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The a",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(RENDERED)


def test_prompt_is_the_rendered_template():
    assert prompt_of({"messages": ASK}) == RENDERED


def test_content_parts_equal_a_string():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert prompt_of({"messages": [{"role": "user", "content": parts}]}) == RENDERED.replace(
        "Hi", "H\ni"
    )


def test_null_content_beside_a_tool_call_is_accepted():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prompt_of({"messages": messages}).startswith("[user]Hi\n[assistant]")


def test_tool_arguments_reach_the_template_as_an_object():
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prompt_of({"messages": messages}, FakeEngine(chat_template=template)) == "Oslo"


def test_developer_becomes_system_where_the_template_knows_no_developer():
    messages = [{"role": "developer", "content": "Be brief."}, *ASK]
    assert prompt_of({"messages": messages}) == "[system]Be brief.\n" + RENDERED


def test_template_variables_come_from_the_request():
    template = "{{ a }} {{ reasoning_effort }} {{ enable_thinking }} {{ documents[0].t }}"
    body = {
        "messages": ASK,
        "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "none",
        "documents": [{"t": "doc"}],
    }
    assert prompt_of(body, FakeEngine(chat_template=template)) == "1 none False doc"


def test_given_variable_wins_over_the_one_that_reasoning_effort_sets():
    body = {
        "messages": ASK,
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert prompt_of(body, FakeEngine(chat_template="{{ enable_thinking }}")) == "False"


def test_reserved_template_variables_are_refused():
    error = error_of(CHAT, {"messages": ASK, "chat_template_kwargs": {"tools": 1, "messages": 2}})
    assert error["param"] == "chat_template_kwargs"
    assert "must not hold messages, tools" in error["message"]


def test_tools_are_rendered_with_tool_choice_none():
    template = "{{ tools[0].function.name }}"
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": "none"}
    assert prompt_of(body, FakeEngine(chat_template=template)) == "f"


def test_continued_message_is_not_repeated_unless_echoed():
    parts = [{"type": "text", "text": "It is"}]
    messages = [*ASK, {"role": "assistant", "content": parts}]
    body = {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 3,
    }
    assert prompt_of(body) == "[user]Hi\n[assistant]It is"
    assert ok(CHAT, body)["choices"][0]["message"]["content"] == "The"
    assert ok(CHAT, {**body, "echo": True})["choices"][0]["message"]["content"] == "It isThe"
    events = stream(CHAT, {**body, "echo": True})
    assert [e["choices"][0]["delta"] for e in events[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": "It is"},
        {"content": "T"},
    ]


def test_role_is_the_last_message_s_where_no_answer_is_opened():
    body = {"messages": ASK, "add_generation_prompt": False, "max_tokens": 1}
    assert ok(CHAT, body)["choices"][0]["message"]["role"] == "user"


@pytest.mark.parametrize("value", [0, -1, 10**6])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_out_of_range_is_named_as_it_was_sent(name, value):
    error = error_of(CHAT, {"messages": ASK, name: value})
    assert error["param"] == name
    assert error["message"].startswith(f"{name} must")


def test_max_completion_tokens_wins():
    engine = FakeEngine(max_model_len=100)
    ok(CHAT, {"messages": ASK, "max_completion_tokens": 3, "max_tokens": 9}, engine)
    ok(CHAT, {"messages": ASK, "max_tokens": 9}, engine)
    ok(CHAT, {"messages": ASK}, engine)
    rest = 100 - len(RENDERED)
    assert [seen.params.max_tokens for seen in engine.seen] == [3, 9, rest]


@pytest.mark.parametrize(("recommended", "used"), [(7, 7), (10**6, 100 - len(RENDERED))])
def test_model_s_max_new_tokens_is_the_default(recommended, used):
    engine = FakeEngine(max_model_len=100, sampling_defaults={"max_tokens": recommended})
    ok(CHAT, {"messages": ASK}, engine)
    assert engine.seen[0].params.max_tokens == used


def test_prompt_text_and_ids_are_returned_on_request():
    body = ok(CHAT, {"messages": ASK, "return_prompt_text": True, "return_token_ids": True})
    assert body["prompt_text"] == RENDERED
    assert bytes(body["prompt_token_ids"]).decode() == RENDERED
    assert bytes(body["choices"][0]["token_ids"][:3]) == b"The"


def test_model_without_template_refuses_chat_and_says_what_to_do():
    error = error_of(CHAT, {"messages": ASK}, FakeEngine(chat_template=""))
    assert "use /v1/completions" in error["message"]
    assert "--chat-template" in error["message"]


def test_server_s_template_replaces_the_model_s():
    assert prompt_of({"messages": ASK}, chat_template="X{{ messages[0].content }}") == "XHi"


def test_request_s_template_needs_trust():
    body = {"messages": ASK, "chat_template": "Y{{ messages[0].content }}"}
    error = error_of(CHAT, body)
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    assert prompt_of(body, trust_request_chat_template=True) == "YHi"
    broken = {"messages": ASK, "chat_template": "{% if %}"}
    error = error_of(CHAT, broken, trust_request_chat_template=True)
    assert error["param"] == "chat_template"


def test_template_s_own_refusal_is_the_client_s_error():
    engine = FakeEngine(chat_template="{{ raise_exception('Roles must alternate.') }}")
    error = error_of(CHAT, {"messages": ASK}, engine)
    assert error["type"] == "BadRequestError"
    assert "Roles must alternate." in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": []}, "tools", "must not be empty"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"continue_final_message": True}, None, "exclude each other"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "must be in [0, 20]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20"),
        ({"logprobs": 2}, "body.logprobs", "Expected `bool | null`"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "only text is served"),
        ({"reasoning_effort": "huge"}, "body.reasoning_effort", "Invalid enum value"),
    ],
)
def test_what_chat_refuses(fields, param, words):
    error = error_of(CHAT, {"messages": ASK, **fields})
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "body.messages"),
        ("hello", "body.messages"),
        ({}, "body.messages"),
        ([1], "body.messages.0"),
        ([{"content": "no role"}], "body.messages.0.role"),
        ([{"role": "user", "content": 5}], "body.messages.0.content"),
        ([{"role": "user", "content": [{"type": "nope"}]}], None),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None),
        ([{"role": "user", "content": [{"text": "x"}]}], "body.messages.0.content.0.type"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_what_messages_are_refused(messages, param):
    assert error_of(CHAT, {"messages": messages})["param"] == param


@pytest.mark.parametrize(
    "part",
    [
        "b",
        {"type": "text", "text": "b"},
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "refusal", "refusal": "b"},
        {"type": "thinking", "thinking": "b"},
    ],
)
def test_parts_that_are_text_are_one_whatever_they_are_called(part):
    answers = []
    for content in ("a\nb", [{"type": "text", "text": "a"}, part]):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        body = {"messages": messages, "add_generation_prompt": False, "echo": True}
        answer = ok(CHAT, {**body, "return_prompt_text": True})
        answers.append((answer["prompt_text"], answer["choices"][0]["message"]["content"]))
    assert answers[0] == answers[1]
    assert answers[0][1].startswith("a\nb")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '"\\ud800"'])
def test_hostile_tool_arguments_are_the_client_s_error(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    error_of(CHAT, {"messages": messages}, FakeEngine(chat_template=template))


def test_ignored_fields_of_other_servers_do_no_harm():
    ok(
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi", "weight": 1}],
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "include_reasoning": True,
            "priority": -3,
            "response_format": {"type": "text"},
            "max_tokens": 1,
            "stream": None,
            "stop": None,
        },
    )


def test_conversation_that_renders_to_nothing_is_refused():
    error = error_of(CHAT, {"messages": ASK}, FakeEngine(chat_template="{{ '' }}"))
    assert error["param"] == "messages"
    assert "at least one token" in error["message"]


@pytest.mark.parametrize("given", ["model", "server"])
@pytest.mark.parametrize(
    ("wanted", "kind"), [("auto", "str"), ("string", "str"), ("openai", "list")]
)
def test_the_form_of_a_content_can_be_chosen_for_any_template(given, wanted, kind):
    source = "{{ messages[0].content is string }}"
    own, server = (source, None) if given == "model" else ("", source)
    body = {"messages": ASK, "return_prompt_text": True}
    answer = ok(
        CHAT,
        body,
        FakeEngine(chat_template=own),
        chat_template=server,
        chat_template_content_format=wanted,
    )
    assert answer["prompt_text"] == str(kind == "str")


def test_the_server_has_defaults_for_variables_of_the_template():
    engine = FakeEngine(chat_template="{{ a }}{{ b }}")
    body = {"messages": ASK, "return_prompt_text": True, "chat_template_kwargs": {"b": 3}}
    answer = ok(CHAT, body, engine, default_chat_template_kwargs={"a": 1, "b": 2})
    assert answer["prompt_text"] == "13"
