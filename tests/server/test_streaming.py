"""Server-sent events: order and shape of chunks, usage, errors before and after the first."""

import asyncio
import json

import pytest

from paged.scheduler.errors import EngineDeadError
from paged.scheduler.params import ParameterError
from tests.server.fake_engine import FakeEngine
from tests.server.serving import (
    CHAT,
    COMPLETIONS,
    Client,
    checked_error,
    connection,
    error_of,
    events_of,
    eventually,
    http_request,
    ok,
    stream,
    text_of,
    with_server,
)

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"prompt": "Hi"}
USAGE = {"include_usage": True}


def without_ids(event: dict) -> dict:
    return {k: v for k, v in event.items() if k not in ("id", "created", "system_fingerprint")}


def test_completion_chunks_are_exactly_these():
    first, last = stream(COMPLETIONS, {**PROMPT, "max_tokens": 2})
    choice = {
        "index": 0,
        "text": "T",
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    envelope = {"object": "text_completion", "model": "tiny"}
    assert without_ids(first) == {**envelope, "choices": [choice]}
    assert without_ids(last) == {
        **envelope,
        "choices": [{**choice, "text": "h", "finish_reason": "length"}],
    }
    assert "system_fingerprint" not in first
    assert last["system_fingerprint"].startswith("paged-")
    assert first["id"] == last["id"]
    assert first["created"] == last["created"]


def test_chat_chunks_are_exactly_these():
    role, first, last = stream(CHAT, {**ASK, "max_tokens": 2})
    envelope = {"object": "chat.completion.chunk", "model": "tiny"}
    assert without_ids(role) == {
        **envelope,
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        "prompt_token_ids": None,
        "prompt_text": None,
    }
    choice = {
        "index": 0,
        "delta": {"content": "T"},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": None,
    }
    assert without_ids(first) == {**envelope, "choices": [choice]}
    finish = {"delta": {"content": "h"}, "finish_reason": "length", "stop_reason": None}
    assert without_ids(last) == {**envelope, "choices": [{**choice, **finish}]}
    assert list(last["choices"][0]) == [
        "index",
        "delta",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "token_ids",
    ]
    assert last["system_fingerprint"].startswith("paged-")


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_usage_comes_last_and_alone(path, body):
    engine = FakeEngine(num_cached_tokens=1)
    *chunks, usage = stream(path, {**body, "max_tokens": 3, "stream_options": USAGE}, engine)
    whole = ok(path, {**body, "max_tokens": 3}, engine)
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert None not in usage.values()
    assert not any("usage" in chunk or "system_fingerprint" in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_continuous_usage_counts_up_to_the_total(path, body):
    options = {**USAGE, "continuous_usage_stats": True}
    events = stream(path, {**body, "max_tokens": 3, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == ([1, 2, 3, 3] if path == COMPLETIONS else [0, 1, 2, 3, 3])


def test_continuous_usage_needs_include_usage():
    events = stream(
        COMPLETIONS, {**PROMPT, "stream_options": {"continuous_usage_stats": True}, "max_tokens": 2}
    )
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("fields", [{}, {"stop": [" is"]}, {"stop": "42"}, {"max_tokens": 5}])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_stream_equals_the_whole(path, body, fields):
    engine = FakeEngine(answer="The answer is 42. 日本 👍🏽 é")
    request = {**body, "max_tokens": 99, **fields}
    events = stream(path, request, engine)
    (whole,) = ok(path, request, engine)["choices"]
    assert text_of(events) == (
        whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    )
    finishes = [(c["finish_reason"], c["stop_reason"]) for c in events[-1]["choices"]]
    assert finishes == [(whole["finish_reason"], whole["stop_reason"])]
    assert not any(e["choices"][0]["finish_reason"] for e in events[:-1])


def test_split_characters_are_never_sent_in_parts():
    engine = FakeEngine(answer="日本👍")
    texts = [e["choices"][0]["text"] for e in stream(COMPLETIONS, PROMPT, engine)]
    assert texts == ["日", "本", "👍", ""]


def test_samples_of_several_prompts_are_told_apart_by_index():
    engine = FakeEngine(answer=lambda index: f"sample {index}")
    events = stream(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 20}, engine)
    texts = [text_of(events, index) for index in range(4)]
    assert texts == ["sample 0", "sample 1"] * 2
    finished = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


def test_every_chat_sample_gets_its_role_first():
    events = stream(CHAT, {**ASK, "n": 3, "max_tokens": 2})
    choices = [event["choices"][0] for event in events]
    assert [c["index"] for c in choices if "role" in c["delta"]] == [0, 1, 2]
    assert all("role" in c["delta"] for c in choices[:3])


def test_echo_appears_once():
    events = stream(COMPLETIONS, {"prompt": "Hi: ", "echo": True, "max_tokens": 3})
    assert [e["choices"][0]["text"] for e in events] == ["Hi: T", "h", "e"]


def test_token_ids_are_streamed_and_prompt_ids_only_once():
    request = {**PROMPT, "max_tokens": 3, "return_token_ids": True}
    choices = [event["choices"][0] for event in stream(COMPLETIONS, request)]
    assert [c["token_ids"] for c in choices] == [[84], [104], [101]]
    assert [c["prompt_token_ids"] for c in choices] == [[72, 105], None, None]
    role, *others = stream(CHAT, {**ASK, "max_tokens": 1, "return_token_ids": True})
    assert bytes(role["prompt_token_ids"]).decode().startswith("[user]Hi")
    assert [e["choices"][0]["token_ids"] for e in others] == [[84]]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (ParameterError("max_tokens", 5, "is too large"), 400),
        (EngineDeadError("gone"), 503),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_error_before_the_first_chunk_has_its_own_status(path, body, refusal, status):
    engine = FakeEngine(refuse=refusal)
    error_of(path, {**body, "stream": True}, engine, status=status)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_error_in_mid_stream_is_one_event_before_done(path, body):
    events = stream(path, {**body, "max_tokens": 9}, FakeEngine(fail_after=2))
    *chunks, last = events
    assert text_of(chunks) == "Th"
    error = checked_error(last, 503)
    assert error["type"] == "ServiceUnavailableError"
    assert "scripted" in error["message"]


def test_failed_sample_is_an_error_event():
    engine = FakeEngine(last_finish_reason="error")
    *_, last = stream(COMPLETIONS, {**PROMPT, "max_tokens": 2}, engine)
    assert checked_error(last, 500)["type"] == "InternalServerError"


def test_headers_keep_proxies_from_collecting_the_stream():
    async def test(client: Client) -> dict[str, str]:
        async with client.post(COMPLETIONS, json={**PROMPT, "stream": True}) as response:
            await response.read()
            return dict(response.headers)

    headers = with_server(test)
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"


def test_slow_reader_holds_up_nobody_and_gets_everything():
    engine = FakeEngine(answer="x" * 10_000, max_model_len=20_000)

    async def test(client: Client) -> bytes:
        request = http_request(COMPLETIONS, {**PROMPT, "stream": True, "max_tokens": 10_000})
        async with connection(client, request) as (reader, _):
            await eventually(lambda: bool(engine.running))
            await asyncio.sleep(0.2)  # the buffers of the connection fill up
            async with client.post(COMPLETIONS, json={**PROMPT, "max_tokens": 3}) as response:
                assert response.status == 200
            assert engine.running, "20 MB do not fit into the buffers of a connection"
            return await reader.read()

    # A long name makes long chunks.
    raw = with_server(test, engine, served_model_names=("m" * 2000,))
    body = b"".join(raw.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])  # out of HTTP's chunks
    assert len(events_of(body)) == 10_000


def test_chunk_is_one_line_whatever_it_holds():
    events = stream(COMPLETIONS, PROMPT, FakeEngine(answer="a\nb\r\n\u2028c"))
    assert text_of(events) == "a\nb\r\n\u2028c"
    assert json.dumps(events)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_every_character_survives_the_events(path, body):
    # What JSON escapes, what it may leave alone, and line breaks that would end an event.
    answer = '"quoted" \\ / \n\r\t\x00\x1f\x7f é漢👍\u2028\u2029 {"text": ""}'
    events = stream(path, {**body, "max_tokens": 200}, FakeEngine(answer=answer))
    assert text_of(events) == answer
    keys = {tuple(event["choices"][0]) for event in events[2:-1]}
    assert len(keys) == 1  # chunks of plain text have the keys of every other
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASK)])
def test_only_streams_ask_for_tokens_as_they_come(path, body):
    engine = FakeEngine()
    whole = ok(path, body, engine)["choices"][0]
    events = stream(path, {**body, "max_tokens": 200}, engine)
    assert [seen.stream for seen in engine.seen] == [False, True]
    assert text_of(events) == FakeEngine.answer
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert text_of(events).startswith(text)
