"""Log probabilities in both formats, whole and streamed."""

import pytest

from paged.scheduler.output import Logprob
from paged.server.logprobs import CompletionLogprobs, chat_logprobs
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, COMPLETIONS, ok, stream

TEXT = "é日!"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def completion_logprobs(**fields) -> dict:
    engine = FakeEngine(answer=TEXT)
    (choice,) = ok(COMPLETIONS, {"prompt": "a", "logprobs": 2, **fields}, engine)["choices"]
    return choice["logprobs"]


def test_completion_tokens_join_to_the_text():
    logprobs = completion_logprobs(max_tokens=6)
    # Tokens are bytes: those inside a character are "", the last one has the character.
    assert logprobs["tokens"] == ["", "é", "", "", "日", "!"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.25] * 6
    assert logprobs["top_logprobs"][5] == {"!": -0.25, "#": -2.0}
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == -0.25
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]


def test_zero_reports_the_sampled_token_only():
    logprobs = completion_logprobs(max_tokens=2, logprobs=0)
    assert logprobs["top_logprobs"] == [{"": -0.25}, {"é": -0.25}]


def test_end_of_text_is_spelt():
    assert completion_logprobs(max_tokens=9)["tokens"][-1] == "<eos>"


def test_completion_stream_has_the_same_logprobs_and_offsets():
    engine = FakeEngine(answer=TEXT)
    events = stream(COMPLETIONS, {"prompt": "a", "logprobs": 2, "max_tokens": 9}, engine)
    parts = [event["choices"][0]["logprobs"] for event in events]
    joined = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    assert joined == completion_logprobs(max_tokens=9)


@pytest.mark.parametrize("prefix", ["token_id:"])
def test_tokens_can_be_named_by_id(prefix):
    logprobs = completion_logprobs(max_tokens=2, return_tokens_as_token_ids=True)
    assert logprobs["tokens"] == [f"{prefix}195", f"{prefix}169"]
    assert list(logprobs["top_logprobs"][0]) == [f"{prefix}195", f"{prefix}197"]


def chat_content(**fields) -> list[dict]:
    engine = FakeEngine(answer=TEXT)
    body = {**ASK, "logprobs": True, "max_tokens": 6, **fields}
    return ok(CHAT, body, engine)["choices"][0]["logprobs"]["content"]


def test_chat_bytes_join_to_the_text():
    content = chat_content()
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    for entry in content:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["top_logprobs"] == []
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]


def test_chat_lists_exactly_top_logprobs_candidates_the_sampled_first():
    for entry in chat_content(top_logprobs=2):
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    assert len(chat_content(top_logprobs=20)[0]["top_logprobs"]) == 20


def test_chat_tokens_can_be_named_by_id():
    entry = chat_content(return_tokens_as_token_ids=True, top_logprobs=2)[0]
    assert entry["token"] == "token_id:195"
    assert entry["bytes"] == [195]
    assert entry["top_logprobs"][1]["token"] == "token_id:197"


def test_chat_stream_has_the_same_logprobs():
    body = {**ASK, "logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    events = stream(CHAT, body, FakeEngine(answer=TEXT))
    parts = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == chat_content(top_logprobs=2)


def test_nothing_is_reported_unless_asked():
    assert ok(COMPLETIONS, {"prompt": "a"})["choices"][0]["logprobs"] is None
    assert ok(CHAT, ASK)["choices"][0]["logprobs"] is None
    assert ok(CHAT, {**ASK, "logprobs": False})["choices"][0]["logprobs"] is None


def test_minus_infinity_becomes_a_number():
    position = {97: Logprob(float("-inf"), 9, "a"), 98: Logprob(-0.5, 1, "b")}
    body = CompletionLogprobs(FakeEngine().tokenizer, as_token_ids=False).body([97], [position])
    assert body["token_logprobs"] == [-9999.0]
    assert body["top_logprobs"] == [{"a": -9999.0, "b": -0.5}]
    chat = chat_logprobs(FakeEngine().tokenizer, [97], [position], num_top=2, as_token_ids=False)
    assert [top["logprob"] for top in chat["content"][0]["top_logprobs"]] == [-9999.0, -0.5]


def test_candidates_spelt_alike_keep_the_likelier_one():
    position = {
        1: Logprob(-0.1, 1, "\ufffd"),
        2: Logprob(-1.0, 2, "\ufffd"),
        3: Logprob(-2.0, 3, "x"),
    }
    body = CompletionLogprobs(FakeEngine().tokenizer, as_token_ids=False).body([1], [position])
    assert body["top_logprobs"] == [{"\ufffd": -0.1, "x": -2.0}]


def test_echo_has_log_probabilities_of_prompt_and_completion():
    fields = {"prompt": "é!", "echo": True, "logprobs": 1, "max_tokens": 2}
    body = ok(COMPLETIONS, fields, FakeEngine(answer=TEXT))
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "é!é"
    assert logprobs["tokens"] == ["", "é", "!", "", "é"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 2]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2] == {"!": -0.5, "#": -1.0}
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][2] == {
        "33": {"logprob": -0.5, "rank": 1, "decoded_token": "!"},
        "35": {"logprob": -1.0, "rank": 2, "decoded_token": "#"},
    }
    events = stream(COMPLETIONS, fields, FakeEngine(answer=TEXT))
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert {key: [x for part in parts for x in part[key]] for key in parts[0]} == logprobs


def test_a_prompt_can_be_scored_without_generating():
    fields = {"prompt": ["ab", "cd"], "echo": True, "logprobs": 0, "max_tokens": 0, "n": 1}
    body = ok(COMPLETIONS, fields, FakeEngine(answer=TEXT))
    assert [choice["text"] for choice in body["choices"]] == ["ab", "cd"]
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == [["a", "b"], ["c", "d"]]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    events = stream(COMPLETIONS, fields, FakeEngine(answer=TEXT))
    tokens = [event["choices"][0]["logprobs"]["tokens"] for event in events]
    assert tokens == [["a", "b"], ["c", "d"]]


def test_chat_reports_the_prompt_too():
    body = ok(CHAT, {**ASK, "prompt_logprobs": 0, "max_tokens": 1, "return_token_ids": True})
    ids, positions = body["prompt_token_ids"], body["prompt_logprobs"]
    assert [list(p) for p in positions[1:]] == [[str(i)] for i in ids[1:]]
    assert ok(CHAT, {**ASK, "prompt_logprobs": False, "max_tokens": 1})["prompt_logprobs"] is None
