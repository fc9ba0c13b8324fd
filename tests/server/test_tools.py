"""Tool calls over HTTP: what is asked of the engine, and what becomes of its text."""

import json

import pytest
from tokenizers import AddedToken

from paged.models.tokenizer import Tokenizer
from paged.server.tool_parsers.formats import TOOL_FORMATS
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, error_of, events_of, ok, with_server

ASK = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
F = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
G = {"type": "function", "function": {"name": "g"}}
TOOLS = [F, G]
NAMED_G = {"type": "function", "function": {"name": "g"}}
F_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G_CALL = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
HERMES = {"tool_call_parser": "hermes"}


def body(**fields) -> dict:
    return {"messages": ASK, "tools": TOOLS, **fields}


def choice_of(answer: str, settings=HERMES, **fields) -> dict:
    engine = FakeEngine(answer=answer, max_model_len=1024)
    return ok(CHAT, body(**fields), engine, **settings)["choices"][0]


def streamed(answer: str, settings=HERMES, **fields) -> list:
    async def test(client):
        async with client.post(CHAT, json=body(stream=True, **fields)) as response:
            raw = await response.read()
            assert response.status == 200, raw
            return events_of(raw)

    return with_server(test, FakeEngine(answer=answer, max_model_len=1024), **settings)


def assembled(events: list) -> dict:
    """Put a stream together as the message and finish reason that it stands for."""
    message: dict = {"content": None}
    calls: list[dict] = []
    finish = None
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for key in ("content", "reasoning", "reasoning_content"):
            if delta.get(key):
                message[key] = (message.get(key) or "") + delta[key]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
        assert finish is None
        finish = choice["finish_reason"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": finish}


def essence(choice: dict) -> dict:
    """Return the same of an answer that came whole."""
    message = {
        key: choice["message"][key]
        for key in ("content", "reasoning", "reasoning_content")
        if choice["message"].get(key) or key == "content"
    }
    if calls := choice["message"].get("tool_calls"):
        message["tool_calls"] = [call["function"] for call in calls]
    return {"message": message, "finish_reason": choice["finish_reason"]}


def test_call_becomes_a_message_of_the_reference_s_shape():
    choice = choice_of(F_CALL)
    (call,) = choice["message"].pop("tool_calls")
    assert call.pop("id").startswith("chatcmpl-tool-")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert choice["stop_reason"] is None


@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```"])
def test_call_without_its_marks_is_a_call_unless_a_grammar_holds_calls_to_their_schemas(fence):
    bare = fence.format('{"name": "f", "arguments": {"a": "x"}}')
    choice = choice_of(bare)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": "x"}'}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    choice = choice_of(bare, tools=[strict])
    assert choice["message"]["content"] == bare
    assert "tool_calls" not in choice["message"]


def test_text_before_calls_is_content_and_ids_differ():
    message = choice_of(f"Let me see.\n{F_CALL}\n{G_CALL}")["message"]
    assert message["content"] == "Let me see."
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2


def test_answer_without_calls_is_as_without_tools():
    choice = choice_of("No tools needed.")
    assert choice["message"]["content"] == "No tools needed."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


THINKING = {**HERMES, "reasoning_parser": "qwen3"}


@pytest.mark.parametrize(
    ("answer", "settings", "fields"),
    [
        (F_CALL, HERMES, {}),
        (f"See:\n{F_CALL}\n{G_CALL}", HERMES, {}),
        ("Text only.", HERMES, {}),
        (F_CALL + "\n<tool_call>\n{", HERMES, {"tool_choice": "required"}),
        (F_CALL, HERMES, {"max_tokens": 45}),  # ends within the arguments
        (F_CALL, HERMES, {"max_tokens": 20}),  # ends before it is a call
        (f"{F_CALL}\n{G_CALL}", HERMES, {"parallel_tool_calls": False}),
        (G_CALL, HERMES, {"tool_choice": NAMED_G}),
        ("<think>Hm.</think>" + F_CALL, THINKING, {}),
        ("<think>Hm.</think>Yes.", THINKING, {"tool_choice": "none"}),
        ("<think>Hm.</think>Yes.", THINKING, {"include_reasoning": False}),
        ('[{"name": "f", "parameters": {"a": 1}}]', {}, {"tool_choice": "required"}),
    ],
)
def test_stream_says_what_the_whole_answer_says(answer, settings, fields):
    whole = essence(choice_of(answer, settings, **fields))
    assert assembled(streamed(answer, settings, **fields)) == whole


def test_first_delta_of_a_call_has_id_and_name_and_the_others_arguments():
    events = streamed(F_CALL)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    (first,) = deltas[1]["tool_calls"]
    assert sorted(first) == ["function", "id", "index", "type"]
    assert first["function"] == {"name": "f", "arguments": ""}
    rest = [part for delta in deltas[2:-1] for part in delta["tool_calls"]]
    assert all(sorted(part) == ["function", "index"] for part in rest)
    assert [part["function"]["arguments"] for part in rest] == list('{"a": 1}')
    assert deltas[-1] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_cut_call_says_that_it_was_cut():
    choice = choice_of(F_CALL, max_tokens=45)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '
    choice = choice_of(F_CALL, max_tokens=20)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", F_CALL[:20])


def test_demanded_calls_have_no_content_beside_them():
    answer = f'{F_CALL}\n<tool_call>\n{{"name": '
    for choice, content in [("required", None), ("auto", '\n<tool_call>\n{"name": ')]:
        message = choice_of(answer, tool_choice=choice, max_tokens=len(answer))["message"]
        assert len(message["tool_calls"]) == 1
        assert message["content"] == content


def test_only_one_call_where_parallel_ones_are_not_wanted():
    message = choice_of(f"{F_CALL}\n{G_CALL}", parallel_tool_calls=False)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_named_choice_keeps_the_finish_reason():
    choice = choice_of(G_CALL, tool_choice=NAMED_G)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "g", "arguments": "{}"}


def test_choice_none_leaves_the_text_alone():
    choice = choice_of(F_CALL, tool_choice="none")
    assert choice["message"]["content"] == F_CALL
    assert choice["finish_reason"] == "stop"


def test_samples_are_read_apart():
    engine = FakeEngine(answer=lambda index: F_CALL if index else "Text.", max_model_len=1024)
    events = stream_of(engine, n=2, temperature=1.0)
    calls = [
        choice["index"]
        for e in events
        for choice in e["choices"]
        if "tool_calls" in choice["delta"]
    ]
    assert calls
    assert set(calls) == {1}


def stream_of(engine: FakeEngine, **fields) -> list:
    async def test(client):
        async with client.post(CHAT, json=body(stream=True, **fields)) as response:
            return events_of(await response.read())

    return with_server(test, engine, **HERMES)


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_logprobs_and_ids_are_all_there(tool_choice):
    fields = {"logprobs": True, "return_token_ids": True, "tool_choice": tool_choice}
    whole = choice_of(F_CALL, **fields)
    choices = [event["choices"][0] for event in streamed(F_CALL, **fields)[1:]]
    ids = [i for choice in choices for i in choice["token_ids"] or ()]
    positions = [
        p for choice in choices if choice["logprobs"] for p in choice["logprobs"]["content"]
    ]
    assert ids == whole["token_ids"]
    assert positions == whole["logprobs"]["content"]
    assert len(positions) == len(F_CALL) + 1


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0}])
def test_calls_are_the_same_in_chunks_of_several_tokens(fields):
    fields |= {"return_token_ids": True}
    fine, coarse = streamed(F_CALL, **fields), streamed(F_CALL, stream_interval=7, **fields)
    assert len(coarse) < len(fine)
    for index in range(fields.get("n", 1)):
        of_sample = [
            [event for event in events if event["choices"][0]["index"] == index]
            for events in (fine, coarse)
        ]
        assert assembled(of_sample[1]) == assembled(of_sample[0])
        chosen = [e["choices"][0].get("token_ids") or () for e in of_sample[1]]
        token_ids = [token_id for ids in chosen for token_id in ids]
        assert bytes(token_ids[:-1]).decode() == F_CALL, "and the end of the text"


def test_usage_counts_every_token_of_a_call():
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = streamed(F_CALL, stream_options=options)
    assert events[-1]["usage"]["completion_tokens"] == len(F_CALL) + 1
    assert all("usage" in event for event in events)


def grammar_of(settings=HERMES, engine: FakeEngine | None = None, **fields) -> str | None:
    engine = engine or FakeEngine(answer=F_CALL, max_model_len=1024)
    ok(CHAT, body(**fields), engine, **settings)
    outputs = engine.seen[-1].params.structured_outputs
    return None if outputs is None else outputs.grammar


def test_only_a_choice_that_demands_a_call_constrains_the_model():
    assert grammar_of() is None
    assert grammar_of(tool_choice="none") is None
    assert "call_1" in grammar_of(tool_choice="required")
    assert "call_1" not in grammar_of(tool_choice=NAMED_G)


def test_strict_function_constrains_the_model_where_it_decides_to_call():
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    assert "TEXT" in grammar_of(tools=[strict, G])
    error = error_of(CHAT, body(tools=[strict], response_format={"type": "json_object"}), **HERMES)
    assert error["param"] == "response_format"
    assert "exclude each other" in error["message"]
    error = error_of(CHAT, body(tools=[strict]), tool_call_parser="pythonic")
    assert "strict functions need" in error["message"]


def special_engine(*marks: str, answer: str) -> FakeEngine:
    """An engine whose vocabulary has the marks as special tokens."""
    engine = FakeEngine(answer=answer, max_model_len=1024)
    backend = engine.tokenizer.backend
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    engine.tokenizer = Tokenizer(backend, eos_token=engine.tokenizer.eos_token)
    return engine


def test_special_tokens_stay_in_the_text_only_where_they_are_marks():
    engine = special_engine("[TOOL_CALLS]", answer='[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    mistral = {"tool_call_parser": "mistral"}
    for settings, fields, skips in [
        (mistral, {}, False),
        (mistral, {"tool_choice": "none"}, True),
        (HERMES, {}, True),
    ]:
        ok(CHAT, body(**fields), engine, **settings)
        assert engine.seen[-1].params.skip_special_tokens == skips
    (call,) = ok(CHAT, body(), engine, **mistral)["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_model_whose_vocabulary_has_newer_marks_is_held_to_the_newer_form():
    engine = special_engine("[TOOL_CALLS]", "[ARGS]", answer='[TOOL_CALLS]f[ARGS]{"a": 1}')
    grammar = grammar_of({"tool_call_parser": "mistral"}, engine, tool_choice="required")
    calls, arguments = (engine.tokenizer.backend.token_to_id(m) for m in ("[TOOL_CALLS]", "[ARGS]"))
    assert f'call_0: <[{calls}]> "f" <[{arguments}]> arguments_0' in grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "body.tools.0", "missing required field `function`"),
        (
            {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
            "body.tools.0.type",
            "Invalid",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools.0",
            "must not be empty",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a\nb"}}]},
            "tools.0",
            r"must be printable, got 'a\nb'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": 5}}]},
            "body.tools.0.function.name",
            "Expected `str`",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools.0.function.parameters",
            "schema of an object",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto"'),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", 'must be "none", "auto"'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
            "tools has only f, g",
        ),
        (
            {"tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "tool_choice demands a call",
        ),
        ({"tool_choice": NAMED_G, "guided_regex": "a"}, "guided_regex", "demands a call"),
    ],
)
def test_what_is_refused(fields, param, words):
    error = error_of(CHAT, body(**fields), **HERMES)
    assert error["param"] == param
    assert words in error["message"]


def test_auto_needs_a_format_and_says_so():
    for settings in ({}, {**HERMES, "enable_auto_tool_choice": False}):
        error = error_of(CHAT, body(), **settings)
        assert error["param"] == "tool_choice"
        assert "requires --enable-auto-tool-choice and --tool-call-parser" in error["message"]


def test_format_is_found_in_the_chat_template(caplog):
    template = '{% if tools %}<tool_call>{"name": 1, "arguments": 2}{% endif %}x'
    engine = FakeEngine(answer=F_CALL, chat_template=template, max_model_len=1024)
    with caplog.at_level("INFO", "paged"):
        assert ok(CHAT, body(), engine)["choices"][0]["finish_reason"] == "tool_calls"
    assert "in the format hermes, which the chat template describes" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tool_call_parser": "nope"}, "--tool-call-parser nope is not known; known are hermes"),
        ({"reasoning_parser": "nope"}, "--reasoning-parser nope is not known; known are qwen3"),
        ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice needs --tool-call-parser"),
    ],
)
def test_wrong_settings_do_not_start(settings, words):
    with pytest.raises(ValueError, match=words):
        ok(CHAT, body(), **settings)


def test_tools_stay_in_the_prompt_of_choice_none_unless_excluded():
    engine = FakeEngine(chat_template="x{{ tools }}", max_model_len=4096)
    for excluded in (False, True):
        fields = body(tool_choice="none", max_tokens=1)
        ok(CHAT, fields, engine, exclude_tools_when_tool_choice_none=excluded)
        assert (engine.seen[-1].prompt == "xNone") == excluded


@pytest.mark.parametrize("arguments", ["[1]", "5", '{"a": '])
def test_arguments_of_earlier_calls_must_be_objects(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    error = error_of(CHAT, {"messages": messages})
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"
    assert "must be the JSON text of an object" in error["message"]


def test_tool_s_answer_reaches_the_template():
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.tool_call_id }} {{ m.content }};{% endfor %}"
    )
    engine = FakeEngine(chat_template=template)
    messages = [{"role": "tool", "tool_call_id": "c1", "content": "21"}]
    ok(CHAT, {"messages": messages, "max_tokens": 1}, engine)
    assert engine.seen[-1].prompt == "tool c1 21;"


# --- reasoning ---------------------------------------------------------------------------------

THOUGHT = "<think>\nHm.\n</think>\n\nYes."


def reasoned(**fields) -> dict:
    engine = FakeEngine(answer=THOUGHT)
    return ok(CHAT, {"messages": ASK, **fields}, engine, reasoning_parser="qwen3")["choices"][0]


def test_reasoning_has_both_names():
    message = reasoned()["message"]
    assert message["reasoning"] == message["reasoning_content"] == "\nHm.\n"
    assert message["content"] == "\n\nYes."


def test_content_is_null_where_there_is_only_reasoning():
    choice = reasoned(max_tokens=10)
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "\nHm"
    assert choice["finish_reason"] == "length"


def test_without_a_parser_the_text_stays_whole():
    body = ok(CHAT, {"messages": ASK}, FakeEngine(answer=THOUGHT))
    assert body["choices"][0]["message"]["content"] == THOUGHT


def test_reasoning_that_is_left_out_shows_in_no_token():
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    choice = reasoned(**fields)
    assert choice["message"]["reasoning"] is None
    assert "reasoning_content" not in choice["message"]
    assert choice["logprobs"] is None
    assert choice["token_ids"] is None
    events = streamed(THOUGHT, {"reasoning_parser": "qwen3"}, tool_choice="none", **fields)
    choices = [event["choices"][0] for event in events]
    assert not any(c.get("token_ids") or c["logprobs"] for c in choices)
    assert "Hm" not in json.dumps(events)


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}, {"n": 2, "temperature": 1}])
def test_usage_counts_the_tokens_of_the_reasoning(fields):
    fields = {"messages": ASK, **fields}
    settings = {"reasoning_parser": "qwen3"}
    usage = ok(CHAT, fields, FakeEngine(answer=THOUGHT), **settings)["usage"]
    expected = {"reasoning_tokens": fields.get("n", 1) * len("\nHm.\n")}  # a byte is a token
    assert usage["completion_tokens_details"] == expected
    options = {"include_usage": True}
    events = streamed(THOUGHT, settings, tool_choice="none", stream_options=options, **fields)
    assert events[-1]["usage"]["completion_tokens_details"] == expected


def test_usage_says_nothing_of_reasoning_where_nobody_looks_for_it():
    assert "completion_tokens_details" not in ok(CHAT, {"messages": ASK})["usage"]
    usage = ok(CHAT, {"messages": ASK}, reasoning_parser="qwen3")["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_template_that_closes_the_reasoning_leaves_only_an_answer():
    template = "x{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    engine = FakeEngine(answer="<think>", chat_template=template)
    fields = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}
    choice = ok(CHAT, fields, engine, reasoning_parser="deepseek_r1")["choices"][0]
    assert choice["message"]["content"] == "<think>"


def test_both_spellings_of_earlier_reasoning_are_accepted():
    for name in ("reasoning", "reasoning_content"):
        engine = FakeEngine(
            chat_template="{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}"
        )
        messages = [{"role": "assistant", "content": "x", name: "Hm."}]
        ok(CHAT, {"messages": messages, "max_tokens": 1}, engine)
        assert engine.seen[-1].prompt == "Hm.Hm."


def test_names_of_formats_are_the_reference_s():
    assert {"hermes", "llama3_json", "mistral", "pythonic"} <= set(TOOL_FORMATS)
