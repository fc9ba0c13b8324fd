"""POST /v1/completions: shapes, prompts, choices, usage, and that a stream says the same."""

import json

import pytest

from paged.scheduler.config import EngineConfig
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.serving import (
    COMPLETIONS,
    Client,
    connection,
    error_of,
    http_request,
    ok,
    stream,
    text_of,
    with_server,
)

ANSWER = "The answer is 42."


def test_body_has_every_key_in_the_reference_s_order():
    body = ok(COMPLETIONS, {"prompt": "Hi", "max_tokens": 5})
    assert list(body) == [
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "kv_transfer_params",
    ]
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "The a",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
    ]


def test_two_prompts_with_two_samples_each_are_numbered_prompt_first():
    engine = FakeEngine(answer=lambda index: f"sample {index}", num_cached_tokens=1)
    body = ok(COMPLETIONS, {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 4, "seed": 1}, engine)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {
        "prompt_tokens": 5,  # once per prompt, however many samples
        "total_tokens": 5 + 16,
        "completion_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert [seen.prompt for seen in engine.seen] == ["ab", "cde"]


def test_samples_keep_their_own_texts():
    engine = FakeEngine(answer=lambda index: f"sample {index}")
    body = ok(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 20}, engine)
    assert [c["text"] for c in body["choices"]] == ["sample 0", "sample 1"] * 2
    assert {c["finish_reason"] for c in body["choices"]} == {"stop"}


def test_cached_tokens_are_reported_even_when_there_are_none():
    usage = ok(COMPLETIONS, {"prompt": "Hi"})["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_prompt_comes_in_four_forms(prompt, ids):
    engine = FakeEngine()
    ok(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}, engine)
    assert [list(seen.prompt_token_ids) for seen in engine.seen] == ids


def test_max_tokens_is_16_by_default_and_cut_to_the_context():
    engine = FakeEngine(max_model_len=20)
    ok(COMPLETIONS, {"prompt": "a"}, engine)
    ok(COMPLETIONS, {"prompt": "a", "max_tokens": None}, engine)
    ok(COMPLETIONS, {"prompt": "a" * 15, "max_tokens": 20}, engine)
    assert [seen.params.max_tokens for seen in engine.seen] == [16, 16, 5]


def test_request_wins_over_the_model_s_defaults():
    engine = FakeEngine(sampling_defaults={"temperature": 0.3, "top_k": 7, "max_tokens": 3})
    ok(COMPLETIONS, {"prompt": "a", "temperature": 0.9}, engine)
    (seen,) = engine.seen
    assert (seen.params.temperature, seen.params.top_k) == (0.9, 7)
    assert seen.params.max_tokens == 16


def test_model_s_defaults_can_be_ignored():
    engine = FakeEngine(
        sampling_defaults={"temperature": 0.3}, config=EngineConfig(generation_config="vllm")
    )
    ok(COMPLETIONS, {"prompt": "a"}, engine)
    assert engine.seen[0].params.temperature == 1.0


def test_every_sampling_field_reaches_the_engine():
    fields = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 9,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop": ["xyz"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "max_tokens": 6,
        "min_tokens": 2,
        "logprobs": 1,
        "allowed_token_ids": [97, 98],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    engine = FakeEngine()
    ok(COMPLETIONS, {"prompt": "a", **fields, "logit_bias": {"97": 1}, "cache_salt": "s"}, engine)
    (seen,) = engine.seen
    got = {name: getattr(seen.params, name) for name in fields}
    lists = {name: list(v) if isinstance(v, tuple) else v for name, v in got.items()}
    assert lists == fields
    assert seen.params.logit_bias == {97: 1.0}
    assert seen.cache_salt == "s"


def test_seed_of_minus_one_is_no_seed():
    engine = FakeEngine()
    ok(COMPLETIONS, {"prompt": "a", "seed": -1}, engine)
    assert engine.seen[0].params.seed is None


def test_echo_puts_the_prompt_in_front():
    assert ok(COMPLETIONS, {"prompt": "Hi: ", "echo": True, "max_tokens": 3})["choices"][0][
        "text"
    ] == ("Hi: The")


def test_echo_of_token_ids_is_their_text():
    body = ok(COMPLETIONS, {"prompt": list(b"Hi: "), "echo": True, "max_tokens": 3})
    assert body["choices"][0]["text"] == "Hi: The"


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_without_tokens_never_asks_the_engine(streamed):
    engine = FakeEngine()
    request = {"prompt": ["Hi", "Ho"], "echo": True, "max_tokens": 0}
    if streamed:
        events = stream(COMPLETIONS, request, engine)
        assert [text_of(events, i) for i in (0, 1)] == ["Hi", "Ho"]
    else:
        body = ok(COMPLETIONS, request, engine)
        assert [c["text"] for c in body["choices"]] == ["Hi", "Ho"]
        assert [c["finish_reason"] for c in body["choices"]] == ["length", "length"]
        assert body["usage"]["completion_tokens"] == 0
    assert engine.seen == []


def test_token_ids_are_returned_on_request_and_replace_the_echo():
    request = {"prompt": "Hi", "max_tokens": 2, "return_token_ids": True, "echo": True}
    (choice,) = ok(COMPLETIONS, request)["choices"]
    assert choice["prompt_token_ids"] == [72, 105]
    assert choice["token_ids"] == [84, 104]
    assert choice["text"] == "Th"


def test_truncation_keeps_the_end_or_the_start():
    engine = FakeEngine(max_model_len=8)
    for fields in (
        {"truncate_prompt_tokens": 2},
        {"truncate_prompt_tokens": 2, "truncation_side": "right"},
        {"truncate_prompt_tokens": -1},
    ):
        ok(COMPLETIONS, {"prompt": "abcdefghij", "max_tokens": 1, **fields}, engine)
    assert [bytes(seen.prompt_token_ids) for seen in engine.seen] == [b"ij", b"ab", b"defghij"]


def test_truncated_prompt_is_echoed_as_it_was_used():
    request = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 1}
    assert ok(COMPLETIONS, request)["choices"][0]["text"] == "efT"


def test_stop_reason_is_the_string_or_the_id():
    (by_text,) = ok(COMPLETIONS, {"prompt": "a", "stop": [" is"], "max_tokens": 99})["choices"]
    assert (by_text["text"], by_text["finish_reason"]) == ("The answer", "stop")
    assert by_text["stop_reason"] == " is"
    request = {"prompt": "a", "stop_token_ids": [ord("n")], "return_token_ids": True}
    (by_id,) = ok(COMPLETIONS, request)["choices"]
    assert (by_id["text"], by_id["stop_reason"]) == ("The a", ord("n"))
    assert bytes(by_id["token_ids"]) == b"The an"


def test_end_of_text_has_no_stop_reason():
    request = {"prompt": "a", "max_tokens": 99, "return_token_ids": True}
    (choice,) = ok(COMPLETIONS, request)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")
    assert choice["stop_reason"] is None
    assert choice["token_ids"][-1] == EOS


@pytest.mark.parametrize(
    ("header", "field", "name"),
    [("from-header", None, "from-header"), (None, "from-body", "from-body"), ("h", "b", "h")],
)
def test_request_id_becomes_the_response_id(header, field, name):
    headers = {"X-Request-Id": header} if header else None
    body = ok(COMPLETIONS, {"prompt": "a", "request_id": field}, headers=headers)
    assert body["id"] == f"cmpl-{name}"


def test_request_id_that_is_not_utf8_does_no_harm():
    async def test(client: Client) -> bytes:
        request = http_request(COMPLETIONS, {"prompt": "a"}, b"X-Request-Id: a\xff\r\n")
        async with connection(client, request) as (reader, _):
            return await reader.read()

    head, _, body = with_server(test).partition(b"\r\n\r\n")
    assert b" 200 OK" in head
    assert json.loads(body)["id"] == "cmpl-a\ufffd"


def test_same_request_id_may_be_used_again_and_for_several_prompts():
    engine = FakeEngine()
    for _ in range(2):
        ok(COMPLETIONS, {"prompt": ["a", "b"], "request_id": "mine"}, engine)
    assert len({seen.request_id for seen in engine.seen}) == 4


def test_first_served_name_is_reported_and_every_one_accepted():
    names = ("first", "second")
    for name in (*names, "", None):
        request = {"prompt": "a", "model": name}
        assert ok(COMPLETIONS, request, served_model_names=names)["model"] == "first"


def test_many_prompts_are_accepted_and_too_many_refused():
    request = {"prompt": ["a"] * 1024, "max_tokens": 1}
    assert len(ok(COMPLETIONS, request)["choices"]) == 1024
    error = error_of(COMPLETIONS, {"prompt": ["a"] * 1025})
    assert error["param"] == "prompt"
    assert "at most 1024 prompts" in error["message"]


def test_failed_sample_is_an_error_of_the_server():
    engine = FakeEngine(last_finish_reason="error")
    error = error_of(COMPLETIONS, {"prompt": "a", "max_tokens": 2}, engine, status=500)
    assert error["type"] == "InternalServerError"


def test_error_of_one_prompt_ends_the_others():
    engine = FakeEngine(answer=lambda _: "abc", fail_after=2)
    error_of(COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 3}, engine, status=503)
    assert not engine.running
    assert len(engine.aborted) == 3
