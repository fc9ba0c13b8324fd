"""/v1/responses: bodies, the sequence of events, the memory, what is refused."""

import asyncio
import json
from typing import Any

import pytest

from paged.server.response_items import ResponseItems
from paged.server.settings import ServerSettings
from paged.server.tool_parsers.events import CallArguments, CallStart, Content, Reasoning
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Client, checked_error, error_of, eventually, ok, with_server

RESPONSES = "/v1/responses"
ANSWER = "The answer is 42."


def stream_of(body: dict[str, Any], engine: FakeEngine | None = None) -> list[dict[str, Any]]:
    """Return the events of a stream, their framing and numbers checked."""

    async def test(client: Client) -> bytes:
        async with client.post(RESPONSES, json={**body, "stream": True}) as response:
            raw = await response.read()
            assert response.status == 200, raw
            assert response.content_type == "text/event-stream"
            return raw

    events = []
    *blocks, rest = with_server(test, engine).decode().split("\n\n")
    assert rest == ""
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def conversation(bodies: list[dict[str, Any]], engine: FakeEngine, **settings) -> list[Any]:
    """Return the answers to bodies, each of which follows the response before it."""

    async def test(client: Client) -> list[Any]:
        answers: list[Any] = []
        for body in bodies:
            if answers:
                body = {**body, "previous_response_id": answers[-1]["id"]}
            async with client.post(RESPONSES, json=body) as response:
                answers.append(await response.json())
        return answers

    return with_server(test, engine, **settings)


def test_answer_has_one_message_and_repeats_what_was_asked():
    body = {"input": "Hi", "temperature": 0.5, "metadata": {"a": "b"}, "instructions": "Be brief."}
    engine = FakeEngine(num_cached_tokens=3)
    answer = ok(RESPONSES, body, engine)
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    ]
    assert answer["temperature"] == 0.5
    assert answer["metadata"] == {"a": "b"}
    assert answer["instructions"] == "Be brief."
    usage = answer["usage"]
    assert usage["output_tokens"] == len(ANSWER) + 1
    assert usage["input_tokens_details"] == {"cached_tokens": 3}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    (seen,) = engine.seen
    assert seen.prompt.index("Be brief.") < seen.prompt.index("Hi")


def test_answer_that_is_cut_off_is_incomplete():
    answer = ok(RESPONSES, {"input": "Hi", "max_output_tokens": 3})
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == "The"


def test_stream_is_the_documented_sequence_and_joins_to_the_answer():
    events = stream_of({"input": "Hi"})
    deltas = ["response.output_text.delta"] * len(ANSWER)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["output"] == events[2]["item"]["content"] == []
    assert events[0]["response"]["status"] == "in_progress"
    assert events[3]["part"]["text"] == ""
    assert "".join(event["delta"] for event in events[4:-4]) == ANSWER
    assert events[-4]["text"] == events[-3]["part"]["text"] == ANSWER
    final = events[-1]["response"]
    assert final["status"] == "completed"
    assert final["output"] == [events[-2]["item"]]
    assert final["usage"]["output_tokens"] == len(ANSWER) + 1


def test_stream_that_is_cut_off_ends_so():
    events = stream_of({"input": "Hi", "max_output_tokens": 2})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


def test_stream_whose_engine_dies_says_so():
    events = stream_of({"input": "Hi"}, FakeEngine(fail_after=3))
    assert events[-1]["type"] == "response.failed"
    assert "scripted" in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["status"] == "failed"


def test_answer_without_a_text_is_an_empty_message():
    answer = ok(RESPONSES, {"input": "Hi"}, FakeEngine(answer=""))
    assert answer["output"][0]["content"][0]["text"] == ""


def test_log_probabilities_are_of_the_text():
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    positions = ok(RESPONSES, body)["output"][0]["content"][0]["logprobs"]
    assert "".join(position["token"] for position in positions).startswith(ANSWER)
    assert all(len(position["top_logprobs"]) == 2 for position in positions)
    events = [e for e in stream_of(body) if e["type"] == "response.output_text.delta"]
    assert [event["logprobs"][0]["token"] for event in events] == list(ANSWER)


def test_log_probabilities_of_given_tokens_come_at_every_position():
    engine = FakeEngine()
    body = {"input": "Hi", "logprob_token_ids": [65, 66], "top_logprobs": 1}
    ok(RESPONSES, body, engine)
    ok(RESPONSES, {"input": "Hi", "logprob_token_ids": [65, 66]}, engine)
    for seen in engine.seen:
        assert list(seen.params.logprob_token_ids) == [65, 66]
        assert seen.params.logprobs is not None
    error = error_of(RESPONSES, {"input": "Hi", "logprob_token_ids": [256]})
    assert error["param"] == "logprob_token_ids"


def test_an_output_that_repeats_itself_is_incomplete_and_says_why():
    engine = FakeEngine(last_finish_reason="repetition", last_stop_reason="repetition_detected")
    detection = {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}
    body = {"input": "Hi", "repetition_detection": detection, "max_output_tokens": 3}
    answer = ok(RESPONSES, body, engine)
    assert engine.seen[0].params.repetition_detection.min_count == 3
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "repetition"}


def test_text_deltas_hold_the_tokens_that_were_asked_for():
    body = {"input": "Hi", "stream_interval": 5}
    events = [e for e in stream_of(body) if e["type"] == "response.output_text.delta"]
    sizes = [len(event["delta"]) for event in events]
    assert sizes[0] == 1
    assert set(sizes[1:-1]) == {5}
    assert sum(sizes) == len(ANSWER)


def test_a_successor_sees_the_conversation_but_not_the_instructions():
    engine = FakeEngine()
    first = {"input": "One", "instructions": "Be brief."}
    second = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Two"}]}]}
    answers = conversation([first, second, {"input": "Three"}], engine)
    assert answers[2]["previous_response_id"] == answers[1]["id"]
    last = engine.seen[-1].prompt
    order = [last.index(text) for text in ("One", ANSWER, "Two", "Three")]
    assert order == sorted(order)
    assert last.count(ANSWER) == 2
    assert "Be brief." not in last


@pytest.mark.parametrize(
    ("first", "settings"),
    [({"store": False}, {}), ({}, {"max_stored_responses": 0}), ({"input": "a" * 3}, {})],
)
def test_what_is_not_stored_has_no_successor(first, settings):
    bodies = [{"input": "One", **first}, {"input": "Two"}]
    answers = conversation(bodies, FakeEngine(), **settings)
    if first.get("input"):
        assert answers[1]["object"] == "response"
        return
    assert answers[0]["store"] is False
    assert checked_error(answers[1], 404)["param"] == "previous_response_id"


def test_responses_can_be_read_and_deleted_by_their_own_tenant_alone():
    keys = ("first", "second")

    async def test(client: Client) -> None:
        first, second = ({"Authorization": f"Bearer {key}"} for key in keys)
        async with client.post(RESPONSES, json={"input": "Hi"}, headers=first) as response:
            answer = await response.json()
        path = f"{RESPONSES}/{answer['id']}"
        statuses = []
        for method, headers in [
            ("GET", second), ("DELETE", second), ("GET", first), ("DELETE", first), ("GET", first),
            ("DELETE", first),
        ]:  # fmt: skip
            async with client.request(method, path, headers=headers) as response:
                statuses.append(response.status)
                if (method, response.status) == ("GET", 200):
                    assert await response.json() == answer
        assert statuses == [404, 404, 200, 200, 404, 404]
        async with client.post(RESPONSES, json={"input": "Hi"}, headers=first) as response:
            path = f"{RESPONSES}/{(await response.json())['id']}/cancel"
        async with client.post(path, headers=first) as response:
            error = checked_error(await response.json(), 400)
            assert "background" in error["message"]

    with_server(test, api_keys=keys)


def test_the_least_recently_used_response_makes_room():
    async def test(client: Client) -> None:
        ids = []
        for _ in range(3):
            async with client.post(RESPONSES, json={"input": "Hi"}) as response:
                ids.append((await response.json())["id"])
            async with client.get(f"{RESPONSES}/{ids[0]}") as response:
                assert response.status == 200
        async with client.get(f"{RESPONSES}/{ids[1]}") as response:
            message = checked_error(await response.json(), 404)["message"]
            assert "the last 2 are kept" in message

    with_server(test, max_stored_responses=2)


def test_calls_and_their_outputs_become_messages_of_the_template():
    template = "{% for m in messages %}[{{ m.role }}|{{ m.content or '' }}|{{ m.tool_call_id or '' }}|{{ m.tool_calls or '' }}]{% endfor %}"  # noqa: E501
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    engine = FakeEngine(chat_template=template)
    ok(RESPONSES, {"input": items}, engine)
    prompt = engine.seen[0].prompt
    assert prompt.startswith("[user|weather?||][assistant|||[{'id': 'c1', 'type': 'function'")
    assert prompt.endswith("[tool|rain|c1|]")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"background": True, "stream": True}, "stream", "cannot be streamed"),
        ({"background": True, "store": False}, "background", "needs store: true"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions or input"),
        ({"max_tool_calls": 1}, "max_tool_calls", "calls no tools"),
        ({"truncation": "auto"}, "truncation", "shorter conversation"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "item_reference"),
        ({"input": [{"content": "x"}]}, "input.0.role", "Field required"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0", "arguments"),
        ({"input": [{"type": "function_call_output"}]}, "input.0", "output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input.0.content.0",
            "send text",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "Field required"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"temperature": 3}, "temperature", "temperature must be in"),
        ({"input": 3}, "body.input", "Expected"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "nonsense", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "needs tools"),
    ],
)
def test_what_is_refused_names_the_field(fields, param, message):
    status = 404 if "previous_response_id" in fields else 400
    error = error_of(RESPONSES, {"input": "Hi", **fields}, status=status)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("choice", ["none", "auto", None])
@pytest.mark.parametrize("tools", [[], None])
def test_a_choice_that_calls_nothing_needs_no_tools(choice, tools):
    ok(RESPONSES, {"input": "Hi", "tools": tools, "tool_choice": choice})


def test_a_negative_bound_of_the_store_is_refused():
    with pytest.raises(ValueError, match="max_stored_responses=-1 must be at least 0"):
        ServerSettings(max_stored_responses=-1)


def test_thoughts_text_and_calls_are_items_one_after_another():
    items = ResponseItems()
    events = items.feed([Reasoning("hm"), Content("so"), CallStart(0, "f")])
    events += items.feed([CallArguments(0, '{"a"'), CallArguments(0, ":1}")])
    events += items.finish(is_complete=True)
    kinds = [type(event).__struct_config__.tag.removeprefix("response.") for event in events]
    assert kinds == [
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    thought, message, call = items.output
    assert (thought.content[0].text, message.content[0].text) == ("hm", "so")
    assert (call.name, call.arguments, call.status) == ("f", '{"a":1}', "completed")
    assert [event.output_index for event in events] == [0] * 6 + [1] * 6 + [2] * 5
    assert call.call_id.startswith("call_")


TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_a_call_is_an_item_and_its_output_goes_on_from_it():
    engine = FakeEngine(answer=f"Let me see.{CALL}")
    settings = {"tool_call_parser": "hermes"}
    first = {"input": "Rain?", "tools": [TOOL]}
    answers = conversation([first], engine, **settings)
    message, call = answers[0]["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], call["status"]) == (
        "function_call",
        "weather",
        "completed",
    )
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert answers[0]["status"] == "completed"
    assert answers[0]["tools"] == [TOOL]

    async def test(client: Client) -> None:
        async with client.post(RESPONSES, json=first) as response:
            answer = await response.json()
        call_id = answer["output"][1]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        body = {"input": [output], "previous_response_id": answer["id"], "tools": [TOOL]}
        async with client.post(RESPONSES, json=body) as response:
            assert response.status == 200, await response.text()

    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content or '' }}|"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}]{% endfor %}"
    )
    engine = FakeEngine(answer=f"Let me see.{CALL}", chat_template=template)
    with_server(test, engine, **settings)
    assert "[assistant|Let me see.|Rome][tool|sunny|]" in engine.seen[-1].prompt


def test_a_streamed_call_joins_to_the_whole_one():
    async def test(client: Client) -> str:
        body = {"input": "Rain?", "tools": [TOOL], "stream": True}
        async with client.post(RESPONSES, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    raw = with_server(test, FakeEngine(answer=CALL), tool_call_parser="hermes")
    events = [json.loads(block.partition("data: ")[2]) for block in raw.split("\n\n")[:-1]]
    kind = "response.function_call_arguments"
    arguments = "".join(e["delta"] for e in events if e["type"] == f"{kind}.delta")
    (done,) = [event for event in events if event["type"] == f"{kind}.done"]
    assert arguments == done["arguments"]
    assert json.loads(arguments) == {"city": "Rome"}
    assert events[-1]["response"]["output"][0]["arguments"] == arguments


def test_the_form_of_the_text_reaches_the_engine():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    engine = FakeEngine()
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = ok(RESPONSES, {"input": "Hi", "text": {"format": form}}, engine)
    constraint = engine.seen[0].params.structured_outputs
    assert json.loads(constraint.json) if isinstance(constraint.json, str) else constraint.json
    assert answer["text"]["format"]["schema"] == schema


def test_thoughts_are_an_item_of_their_own_and_can_be_sent_back():
    engine = FakeEngine(answer="<think>hm</think>so")
    settings = {"reasoning_parser": "deepseek_r1"}
    answers = conversation([{"input": "One"}, {"input": "Two"}], engine, **settings)
    thought, message = answers[0]["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "hm")
    assert message["content"][0]["text"] == "so"
    assert answers[1]["status"] == "completed"
    assert answers[0]["usage"]["output_tokens_details"] == {"reasoning_tokens": len("hm")}


async def json_of(client: Client, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with client.request(method, path, json=body) as response:
        return response.status, await response.json()


def test_a_response_in_the_background_can_be_asked_for_until_it_is_there():
    async def test(client: Client) -> None:
        _, answer = await json_of(client, "POST", RESPONSES, {"input": "Hi", "background": True})
        assert (answer["status"], answer["output"]) == ("in_progress", [])
        path = f"{RESPONSES}/{answer['id']}"
        early = {"input": "More", "previous_response_id": answer["id"]}
        status, refusal = await json_of(client, "POST", RESPONSES, early)
        assert "is in_progress" in checked_error(refusal, 400)["message"]
        while answer["status"] == "in_progress":
            await asyncio.sleep(0.01)
            _, answer = await json_of(client, "GET", path)
        assert answer["output"][0]["content"][0]["text"] == ANSWER
        status, answer = await json_of(client, "POST", f"{path}/cancel")
        assert (status, answer["status"]) == (200, "completed")
        status, _ = await json_of(client, "POST", RESPONSES, early)
        assert status == 200

    with_server(test, FakeEngine(step_seconds=0.01))


@pytest.mark.parametrize("end", ["cancel", "delete", "shutdown"])
def test_a_response_in_the_background_is_ended_in_the_engine(end):
    engine = FakeEngine(answer="a" * 9000, max_model_len=10_000, step_seconds=0.02)

    async def test(client: Client) -> None:
        _, answer = await json_of(client, "POST", RESPONSES, {"input": "Hi", "background": True})
        path = f"{RESPONSES}/{answer['id']}"
        await eventually(lambda: bool(engine.running))
        if end == "cancel":
            status, answer = await json_of(client, "POST", f"{path}/cancel")
            assert (status, answer["status"]) == (200, "cancelled")
        elif end == "delete":
            assert (await json_of(client, "DELETE", path))[0] == 200
            assert (await json_of(client, "GET", path))[0] == 404

    with_server(test, engine)
    assert len(engine.aborted) == 1
    assert not engine.running


def test_a_response_in_the_background_that_fails_says_why():
    async def test(client: Client) -> None:
        _, answer = await json_of(client, "POST", RESPONSES, {"input": "Hi", "background": True})
        while answer["status"] == "in_progress":
            await asyncio.sleep(0.01)
            _, answer = await json_of(client, "GET", f"{RESPONSES}/{answer['id']}")
        assert answer["status"] == "failed"
        assert "scripted" in answer["error"]["message"]

    with_server(test, FakeEngine(fail_after=3))
