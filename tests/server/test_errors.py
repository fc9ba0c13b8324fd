"""What is refused, with which status, and which field the error names."""

import json

import pytest
from aiohttp import web

from paged.scheduler.errors import EngineDeadError, QueueFullError
from paged.scheduler.params import ParameterError
from paged.server.app import make_app
from tests.server.fake_engine import FakeEngine
from tests.server.serving import (
    CHAT,
    COMPLETIONS,
    Client,
    checked_error,
    connection,
    error_of,
    ok,
    with_server,
)

PROMPT = {"prompt": "x", "max_tokens": 1}
ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def post_raw(
    raw: bytes, headers: dict | None = None, path: str = COMPLETIONS, **settings
) -> tuple[int, dict]:
    async def test(client: Client) -> tuple[int, dict]:
        head = {"Content-Type": "application/json", **(headers or {})}
        async with client.post(path, data=raw, headers=head) as response:
            return response.status, await response.json()

    return with_server(test, **settings)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 10**7}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"seed": 2**63}, "seed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        *[({"cache_salt": salt}, "cache_salt") for salt in ("a/b", "a\\b", "a@b", "x" * 129, "\0")],
    ],
)
def test_bad_value_names_its_field(path, fields, param):
    error = error_of(path, {**(PROMPT if path == COMPLETIONS else ASK), **fields})
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "warm"}, "body.temperature"),
        ({"max_tokens": "ten"}, "body.max_tokens"),
        ({"max_tokens": 1.5}, "body.max_tokens"),
        ({"max_tokens": True}, "body.max_tokens"),
        ({"n": "two"}, "body.n"),
        ({"seed": "abc"}, "body.seed"),
        ({"stream": "maybe"}, "body.stream"),
        ({"stop": 7}, "body.stop"),
        ({"stop": ["a", 7]}, "body.stop.1"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "body.stop"),
        ({"stop": [f"s{i}" for i in range(10_000)]}, "body.stop"),
        ({"stop": "x" * 5000}, "body.stop"),
        ({"stop_token_ids": ["a"]}, "body.stop_token_ids.0"),
        ({"stop_token_ids": [1] * 1025}, "body.stop_token_ids"),
        ({"logit_bias": [1, 2]}, "body.logit_bias"),
        ({"logit_bias": {"1": "x"}}, "body.logit_bias"),
        ({"bad_words": ["x"] * 1025}, "body.bad_words"),
        ({"cache_salt": ""}, "body.cache_salt"),
        ({"cache_salt": 3}, "body.cache_salt"),
        ({"response_format": "json"}, "body.response_format"),
        (
            {"stream": True, "stream_options": {"include_usage": 2}},
            "body.stream_options.include_usage",
        ),
        ({"truncation_side": "middle"}, "body.truncation_side"),
        ({"request_id": "a\nb"}, "body.request_id"),
        ({"request_id": "a\n"}, "body.request_id"),
        ({"request_id": "x" * 257}, "body.request_id"),
    ],
)
def test_bad_type_names_its_path(path, fields, param):
    error = error_of(path, {**(PROMPT if path == COMPLETIONS else ASK), **fields})
    assert error["type"] == "Bad Request"
    assert error["param"] == param
    assert param.removeprefix("body.") in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("thinking_token_budget", 10),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("vllm_xargs", {"a": 1}),
    ],
)
def test_what_is_not_supported_is_said_aloud(path, field, value):
    error = error_of(path, {**(PROMPT if path == COMPLETIONS else ASK), field: value})
    assert error["param"] == field
    assert "not supported by this version" in error["message"]
    assert error["message"].endswith(".")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": None},
        {"prompt_logprobs": False},
        {"use_beam_search": False},
        {"logprob_token_ids": []},
        {"thinking_token_budget": -1},
        {"stream_interval": 1},
        {"vllm_xargs": {}},
        {"suffix": ""},
        {"response_format": {"type": "text"}},
        {"best_of": 3, "no_such_field": [[]]},
    ],
)
def test_neutral_and_unknown_values_are_accepted(fields):
    ok(COMPLETIONS, {**PROMPT, **fields})


def test_unknown_response_format_lists_the_known_ones():
    error = error_of(COMPLETIONS, {**PROMPT, "response_format": {"type": "yaml"}})
    assert error["param"] == "response_format"
    assert "json_schema" in error["message"]


def test_suffix_and_embeddings_are_refused_for_completions():
    for field, value in (("suffix", "y"), ("prompt_embeds", "AAAA")):
        assert error_of(COMPLETIONS, {**PROMPT, field: value})["param"] == field


@pytest.mark.parametrize("value", [1, True, -1])
def test_logprobs_of_a_prompt_are_not_streamed(value):
    error = error_of(COMPLETIONS, {**PROMPT, "prompt_logprobs": value, "stream": True})
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize("value", [-1, 21])
def test_logprobs_of_a_prompt_are_bounded(value):
    error = error_of(COMPLETIONS, {**PROMPT, "prompt_logprobs": value})
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    "value",
    [
        {"max_pattern_size": 3},
        {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
        {"max_pattern_size": 5000, "min_count": 2},
        {"max_pattern_size": 3, "min_pattern_size": -1, "min_count": 2},
    ],
)
def test_repetition_detection_is_checked(value):
    error = error_of(COMPLETIONS, {**PROMPT, "repetition_detection": value})
    assert error["param"] == "repetition_detection"


def test_too_many_logprobs():
    assert error_of(COMPLETIONS, {**PROMPT, "logprobs": 21})["param"] == "logprobs"


def test_parameter_errors_end_with_parameter_and_value():
    message = error_of(COMPLETIONS, {**PROMPT, "temperature": 3.0})["message"]
    assert message == ("temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["", "a"], "prompt"),
        ([[1], []], "prompt"),
        ([-1], "prompt"),
        ([256], "prompt"),
        ([10**9], "prompt"),
        ([[97], [256]], "prompt"),
        (["a", 1], "prompt"),
        ([1, "a"], "prompt"),
        ([[1], "a"], "prompt"),
        (None, "body.prompt"),
        (5, "body.prompt"),
        ({"a": 1}, "body.prompt"),
        ([True, "x"], "body.prompt.0"),
        ([["a"]], "body.prompt.0.0"),
    ],
)
def test_bad_prompt(prompt, param):
    assert error_of(COMPLETIONS, {"prompt": prompt})["param"] == param


def test_missing_prompt():
    error = error_of(COMPLETIONS, {})
    assert error["param"] == "body.prompt"
    assert error["message"] == "prompt: Field required."


@pytest.mark.parametrize("length", [64, 65])
def test_prompt_must_leave_room_for_a_token(length):
    engine = FakeEngine(max_model_len=64)
    error = error_of(COMPLETIONS, {"prompt": [97] * length}, engine)
    assert error["param"] == "prompt"
    assert f"maximum context length is 64 tokens, but the prompt has {length}" in error["message"]
    ok(COMPLETIONS, {"prompt": [97] * 63}, engine)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    engine = FakeEngine(max_model_len=64)
    # The longest token, "<bos>", has 5 characters.
    error = error_of(CHAT, {"messages": [{"role": "user", "content": "a" * 10**6}]}, engine)
    assert error["param"] == "messages"
    assert "the prompt has at least 200004" in error["message"]


def test_long_text_is_tokenized_and_cut():
    engine = FakeEngine(max_model_len=64)
    text = "ab" * 20_000
    ok(COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 3, "max_tokens": 1}, engine)
    assert bytes(engine.seen[0].prompt_token_ids) == b"bab"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_unknown_model_is_404(path):
    body = {"prompt": "x", "messages": ASK["messages"], "tokens": [1], "model": "no-such-model"}
    if path == "/tokenize":
        del body["messages"]
    error = error_of(path, body, status=404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error["message"] == "The model `no-such-model` does not exist. Valid aliases: tiny."


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", "body.0"),
        (b"{", "body.1"),
        (b'{"model": ', "body.10"),
        (b"{'model': 'm'}", "body.1"),
        (b"\x00\x01", "body.0"),
        (b'{"prompt": "x"} trailing', "body.17"),
        (b'{"prompt": "x", "temperature": NaN}', "body.31"),
        (b'{"prompt": "\xff\xfe"}', "body.12"),
        (b'{"prompt": "x", "unknown": "\xff\xfe"}', "body.28"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"7", "body"),
        (b'"text"', "body"),
        (b'{"prompt": "x", "temperature": 1e999}', "body.temperature"),
    ],
)
def test_malformed_body(raw, param):
    status, answer = post_raw(raw)
    error = checked_error(answer, 400)
    assert (status, error["type"], error["param"]) == (400, "Bad Request", param)


@pytest.mark.parametrize("field", [b"prompt", b"unknown", b"structured_outputs"])
def test_deep_nesting_is_refused(field):
    status, _ = post_raw(b'{"' + field + b'": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert status == 400


def test_lone_surrogate_is_the_client_s_error():
    assert post_raw(b'{"prompt": "a\\ud83d b"}')[0] == 400


@pytest.mark.parametrize("half", ["\\ud800", "\\uDBFF", "\\udc00"])
@pytest.mark.parametrize("rest", ["", "a", "abcde", "abcdef" * 9])
def test_half_a_character_is_said_to_be_one(half, rest):
    status, answer = post_raw(f'{{"prompt": "{half}{rest}"}}'.encode())
    error = checked_error(answer, status)
    assert status == 400
    assert "surrogate" in error["message"]
    assert error["param"].startswith("body.")


@pytest.mark.parametrize(
    "raw", [b"", b'{"prompt": "a', b'{"prompt": "\\ud83d', b'{"prompt": "\\ud83d\\ude00']
)
def test_half_a_body_is_said_to_be_one(raw):
    status, answer = post_raw(raw)
    assert "truncated" in checked_error(answer, status)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_wrong_content_type(kind):
    status, answer = post_raw(json.dumps(PROMPT).encode(), {"Content-Type": kind})
    assert status == 400
    assert checked_error(answer, 400)["message"] == (
        "Unsupported Media Type: Only 'application/json' is allowed"
    )


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_content_type_may_have_parameters_and_capitals(kind):
    assert post_raw(json.dumps(PROMPT).encode(), {"Content-Type": kind})[0] == 200


def test_large_body_is_413_by_its_announced_size():
    async def test(client: Client) -> bytes:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        # Nothing of the body is sent: the answer cannot wait for it.
        async with connection(client, head + b"Content-Length: 99999999\r\n\r\n") as (reader, _):
            return await reader.readuntil(b"}}")

    head, _, body = with_server(test).partition(b"\r\n\r\n")
    assert b" 413 " in head
    error = checked_error(json.loads(body), 413)
    assert "--client-max-size" in error["message"]


def test_large_body_of_unknown_size_is_413():
    async def pieces():
        for _ in range(100):
            yield b" " * 1000

    async def test(client: Client) -> tuple[int, dict]:
        head = {"Content-Type": "application/json"}
        async with client.post(COMPLETIONS, data=pieces(), headers=head) as response:
            return response.status, await response.json()

    status, answer = with_server(test, client_max_size=50_000)
    assert status == 413
    checked_error(answer, 413)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
def test_full_queue_is_429_with_retry_after(path, streamed):
    engine = FakeEngine(refuse=QueueFullError("5 requests are waiting; try again later."))
    body = {**(PROMPT if path == COMPLETIONS else ASK), "stream": streamed}

    async def test(client: Client) -> tuple[int, str, dict]:
        async with client.post(path, json=body) as response:
            return response.status, response.headers["Retry-After"], await response.json()

    status, retry_after, answer = with_server(test, engine)
    assert (status, retry_after) == (429, "1")
    assert checked_error(answer, 429)["message"] == "5 requests are waiting; try again later."


def test_engine_s_parameter_errors_are_the_client_s():
    engine = FakeEngine(refuse=ParameterError("logit_bias", 65, "may have at most 64 ids"))
    assert error_of(COMPLETIONS, PROMPT, engine)["param"] == "logit_bias"


def test_dead_engine_is_503():
    engine = FakeEngine(refuse=EngineDeadError("The engine has failed."))
    error = error_of(COMPLETIONS, PROMPT, engine, status=503)
    assert error["type"] == "ServiceUnavailableError"


def test_unexpected_error_is_500_without_its_insides(caplog):
    engine = FakeEngine(refuse=ZeroDivisionError("secret path /opt/x"))
    error = error_of(COMPLETIONS, PROMPT, engine, status=500)
    assert error["type"] == "InternalServerError"
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_unknown_route_and_wrong_method_have_the_error_shape():
    async def test(client: Client) -> list[tuple[int, dict, str | None]]:
        answers = []
        for method, path in (("GET", "/nope"), ("GET", COMPLETIONS), ("DELETE", "/health")):
            async with client.request(method, path) as response:
                allow = response.headers.get("Allow")
                answers.append((response.status, await response.json(), allow))
        return answers

    unknown, wrong, other = with_server(test)
    error = checked_error(unknown[1], 404)
    assert (unknown[0], error["type"]) == (404, "NotFoundError")
    assert "no route GET /nope" in error["message"]
    error = checked_error(wrong[1], 405)
    assert (wrong[0], wrong[2]) == (405, "POST")
    assert "Method GET is not allowed here; use POST." in error["message"]
    assert other[0] == 405


def test_body_that_is_not_what_its_headers_say_is_the_client_s_error():
    status, answer = post_raw(b"hello", {"Content-Encoding": "gzip"})
    assert status == 400
    assert "is not what its headers announce" in checked_error(answer, 400)["message"]


def test_other_http_errors_keep_their_status():
    async def handler(_request: web.Request) -> web.Response:
        raise web.HTTPForbidden(reason="Not today")

    app = make_app(FakeEngine())
    app.router.add_get("/closed", handler)

    async def test(client: Client) -> tuple[int, dict]:
        async with client.get("/closed") as response:
            return response.status, await response.json()

    status, answer = with_server(test, app=app)
    assert status == 403
    assert checked_error(answer, 403)["message"] == "Not today"


def test_numbers_and_flags_may_be_spelt_as_the_reference_takes_them():
    fields = {"max_tokens": "3", "temperature": "0.5", "top_k": 4.0, "logprobs": "1", "echo": 0}
    engine = FakeEngine()
    body = ok(COMPLETIONS, {"prompt": "12", **fields, "stop": "7", "ignore_eos": "true"}, engine)
    assert body["usage"]["completion_tokens"] == 3
    params = engine.seen[0].params
    assert (params.temperature, params.top_k, params.logprobs) == (0.5, 4, 1)
    assert params.ignore_eos is True
    assert engine.seen[0].prompt == "12"
