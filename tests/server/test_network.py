"""Browsers of other origins, request ids, a proxy's prefix, keep-alives, TLS and Unix sockets."""

import asyncio
import json
import ssl
import subprocess

import aiohttp
import pytest
from aiohttp import web

from paged.server.app import make_app, make_runner
from paged.server.cli_errors import UserError
from paged.server.cli_serve import reserve_socket
from paged.server.settings import CorsSettings, ServerSettings
from paged.server.tls import TlsFiles, make_ssl_context
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, COMPLETIONS, Client, events_of, eventually, ok, with_server

PROMPT = {"prompt": "a", "max_tokens": 2}
ASK = {"messages": [{"role": "user", "content": "a"}]}
PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def answer(method: str, path: str, headers=None, body=None, **settings) -> tuple[int, dict]:
    async def test(client: Client) -> tuple[int, dict]:
        async with client.request(method, path, headers=headers, json=body) as response:
            await response.read()
            return response.status, response.headers

    return with_server(test, **settings)


def allowing(*origins: str, **fields) -> dict:
    return {"cors": CorsSettings(origins=origins, **fields), "api_keys": ("key",)}


def test_no_origin_is_let_in_unless_asked():
    status, headers = answer("OPTIONS", CHAT, PREFLIGHT, api_keys=("key",))
    assert status == 401
    status, headers = answer("POST", COMPLETIONS, {"Origin": PAGE}, PROMPT)
    assert status == 200
    assert not [name for name in headers if name.startswith("Access-Control")]


def test_a_preflight_needs_no_key_and_names_what_is_allowed():
    status, headers = answer("OPTIONS", CHAT, PREFLIGHT, **allowing(PAGE))
    assert status == 200
    assert headers["Access-Control-Allow-Origin"] == PAGE
    assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Vary"] == "Origin"
    assert "Access-Control-Allow-Credentials" not in headers


@pytest.mark.parametrize(
    ("origin", "fields"),
    [
        ("https://evil.example", {}),
        ("null", {}),
        (PAGE, {"methods": ("GET",)}),
        (PAGE, {"headers": ("content-type",)}),
    ],
)
def test_a_preflight_of_something_else_is_refused(origin, fields):
    headers = {**PREFLIGHT, "Origin": origin}
    status, _ = answer("OPTIONS", CHAT, headers, **allowing(PAGE, **fields))
    assert status == 400


@pytest.mark.parametrize("path", [COMPLETIONS, "/nowhere"])
def test_answers_and_errors_can_be_read_by_the_listed_origin_only(path):
    for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
        _, headers = answer("POST", path, {"Origin": origin}, PROMPT, **allowing(PAGE))
        assert headers.get("Access-Control-Allow-Origin") == allowed


def test_a_star_lets_all_in_and_with_credentials_by_name():
    _, headers = answer("GET", "/health", {"Origin": PAGE}, **allowing("*"))
    assert headers["Access-Control-Allow-Origin"] == "*"
    settings = allowing("*", allow_credentials=True)
    _, headers = answer("GET", "/health", {"Origin": PAGE}, **settings)
    assert headers["Access-Control-Allow-Origin"] == PAGE
    assert headers["Access-Control-Allow-Credentials"] == "true"


@pytest.mark.parametrize("stream", [True, False])
def test_request_ids_come_back_if_asked(stream):
    body = {**PROMPT, "stream": stream}
    _, headers = answer("POST", COMPLETIONS, {"X-Request-Id": "mine"}, body)
    assert "X-Request-Id" not in headers
    on = {"request_id_headers": True}
    _, headers = answer("POST", COMPLETIONS, {"X-Request-Id": "mine"}, body, **on)
    assert headers["X-Request-Id"] == "mine"
    _, headers = answer("POST", COMPLETIONS, None, body, **on)
    assert len(headers["X-Request-Id"]) == 32
    _, headers = answer("GET", "/nowhere", {"X-Request-Id": "lost"}, **on)
    assert headers["X-Request-Id"] == "lost"


def test_a_proxy_may_leave_its_prefix_and_the_key_is_asked_for_all_the_same():
    settings = {"root_path": "/llm", "api_keys": ("key",)}
    key = {"Authorization": "Bearer key"}
    assert answer("GET", "/llm/v1/models", key, **settings)[0] == 200
    assert answer("GET", "/llm//v1//models", key, **settings)[0] == 200
    assert answer("GET", "/v1/models", key, **settings)[0] == 200
    assert answer("POST", f"/llm{COMPLETIONS}", key, PROMPT, **settings)[0] == 200
    assert answer("GET", "/llm/health", **settings)[0] == 200
    assert answer("GET", "/llm/v1/models", **settings)[0] == 401
    assert answer("GET", "/llm/nowhere", key, **settings)[0] == 404
    assert answer("GET", "/llmv1/models", key, **settings)[0] == 404


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_a_root_path_is_a_prefix(path):
    with pytest.raises(ValueError, match="must start with a slash and not end with one"):
        ServerSettings(root_path=path)


def test_a_silent_stream_gets_comments_and_the_same_events():
    async def test(client: Client) -> bytes:
        async with client.post(COMPLETIONS, json={**PROMPT, "stream": True}) as response:
            return await response.read()

    engine = FakeEngine(step_seconds=0.1)
    raw = with_server(test, engine, sse_keep_alive_seconds=0.02)
    comments = raw.count(b": keep-alive\n\n")
    assert 1 <= comments <= 10
    events = events_of(raw.replace(b": keep-alive\n\n", b""))
    assert "".join(event["choices"][0]["text"] for event in events) == "Th"


def test_comments_and_intervals_leave_a_responses_stream_what_it_is():
    async def test(client: Client) -> bytes:
        async with client.post("/v1/responses", json={"input": "a", "stream": True}) as response:
            return await response.read()

    plain = with_server(test).decode()
    engine = FakeEngine(step_seconds=0.05)
    raw = with_server(test, engine, sse_keep_alive_seconds=0.02, stream_interval=5).decode()
    assert ": keep-alive\n\n" in raw
    assert "[DONE]" not in raw
    found = []
    for stream in (plain, raw.replace(": keep-alive\n\n", "")):
        blocks = stream.removesuffix("\n\n").split("\n\n")
        events = [json.loads(block.partition("data: ")[2]) for block in blocks]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        found.append([e["delta"] for e in events if e["type"] == "response.output_text.delta"])
    assert "".join(found[0]) == "".join(found[1]) == "The answer is 42."
    assert [len(delta) for delta in found[1]] == [1, 5, 5, 5, 1]


def test_a_disconnect_during_silence_aborts():
    engine = FakeEngine(step_seconds=0.1, max_model_len=10_000)

    async def test(client: Client) -> None:
        body = {**PROMPT, "stream": True, "max_tokens": 1000, "ignore_eos": True}
        response = await client.post(COMPLETIONS, json=body)
        await response.content.readline()
        response.close()
        await eventually(lambda: bool(engine.aborted))

    with_server(test, engine, sse_keep_alive_seconds=0.02)


@pytest.mark.parametrize(("server", "request_", "expected"), [(1, 3, 3), (4, None, 4), (4, 2, 4)])
def test_chunks_hold_the_tokens_that_were_asked_for(server, request_, expected):
    async def test(client: Client) -> bytes:
        body = {"prompt": "a", "n": 2, "temperature": 1, "max_tokens": 12, "stream": True}
        body |= {"logprobs": 0, "stream_interval": request_}
        async with client.post(COMPLETIONS, json=body) as response:
            return await response.read()

    events = events_of(with_server(test, stream_interval=server))
    for index in range(2):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        sizes = [len(choice["logprobs"]["tokens"]) for choice in choices]
        assert sizes[0] == 1
        assert set(sizes[1:-1]) == {expected}
        assert sum(sizes) == 12
        assert "".join(choice["text"] for choice in choices) == "The answer i"


def test_usage_in_every_stream_if_the_server_says_so():
    async def test(client: Client) -> bytes:
        async with client.post(COMPLETIONS, json={**PROMPT, "stream": True}) as response:
            return await response.read()

    events = events_of(with_server(test, force_include_usage=True))
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2]
    assert events[-1]["choices"] == []


def test_settings_change_role_spelling_and_sampling():
    (choice,) = ok(CHAT, ASK, response_role="model")["choices"]
    assert choice["message"]["role"] == "model"
    body = {**PROMPT, "logprobs": 0}
    (choice,) = ok(COMPLETIONS, body, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"][0] == "token_id:84"
    engine = FakeEngine(sampling_defaults={"temperature": 0.6, "top_k": 7})
    override = {"temperature": 0.5, "max_new_tokens": 3}
    for path, fields in ((COMPLETIONS, {"prompt": "a", "max_tokens": 9}), (CHAT, ASK)):
        body = ok(path, fields, engine, override_generation_config=override)
        assert body["usage"]["completion_tokens"] == 3
        params = engine.seen[-1].params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 3)


@pytest.mark.parametrize("override", [{"temperatur": 1}, {"temperature": 9}, {"max_new_tokens": 0}])
def test_a_wrong_override_ends_the_start(override):
    settings = ServerSettings(override_generation_config=override)
    with pytest.raises(ValueError, match="--override-generation-config"):
        make_app(FakeEngine(), settings)


def test_https_serves_whoever_trusts_the_certificate(certificate):
    async def run() -> int:
        runner = make_runner(make_app(FakeEngine(), ServerSettings()), shutdown_timeout=0.1)
        await runner.setup()
        context = make_ssl_context(certificate)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        port = runner.addresses[0][1]
        trusting = ssl.create_default_context(cafile=certificate.certfile)
        try:
            async with aiohttp.ClientSession() as session:
                url = f"https://127.0.0.1:{port}/health"
                async with session.get(url, ssl=trusting) as response:
                    status = response.status
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await session.get(url)
            return status
        finally:
            await runner.cleanup()

    assert asyncio.run(run()) == 200


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"certfile": "/nowhere"}, "--ssl-certfile"),
        ({"keyfile": "/nowhere"}, "--ssl-keyfile"),
        ({"ca_certs": "/nowhere"}, "--ssl-ca-certs"),
        ({"ciphers": "nonsense"}, "--ssl-ciphers"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(certificate, fields, flag):
    values = {"certfile": certificate.certfile, "keyfile": certificate.keyfile, **fields}
    with pytest.raises(ValueError, match=flag):
        make_ssl_context(TlsFiles(**values))


def test_an_encrypted_key_is_an_error_and_no_question(certificate, tmp_path):
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", certificate.keyfile, "-out", str(locked)]
    subprocess.run([*command, "-aes256", "-passout", "pass:x"], check=True, capture_output=True)
    with pytest.raises(ValueError, match="encrypted"):
        make_ssl_context(TlsFiles(certfile=certificate.certfile, keyfile=str(locked)))


def test_clients_certificates_can_be_required(certificate):
    files = TlsFiles(
        certfile=certificate.certfile,
        keyfile=certificate.keyfile,
        ca_certs=certificate.certfile,
        requires_client_certificate=True,
    )
    assert make_ssl_context(files).verify_mode is ssl.CERT_REQUIRED


def test_a_unix_socket_is_taken_over_only_if_nobody_serves_it(tmp_path):
    path = str(tmp_path / "s")
    with reserve_socket(path) as first:
        first.listen()
        with pytest.raises(UserError, match="another program serves it"):
            reserve_socket(path)
    with reserve_socket(path) as again:  # left behind
        assert again.getsockname() == path
    file = tmp_path / "file"
    file.write_text("keep")
    with pytest.raises(UserError, match="cannot listen on --uds"):
        reserve_socket(str(file))
    assert file.read_text() == "keep"
