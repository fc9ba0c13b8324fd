"""Models, version, health, load, metrics page, double slashes, draining."""

import pytest

from paged._version import __version__
from paged.scheduler.errors import EngineDeadError
from paged.server.app import make_app
from paged.server.context import CONTEXT
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, COMPLETIONS, Client, checked_error, error_of, ok, with_server


def get(path: str, engine: FakeEngine | None = None, **settings) -> tuple[int, dict | None]:
    async def test(client: Client) -> tuple[int, dict | None]:
        async with client.get(path) as response:
            return response.status, await response.json() if await response.read() else None

    return with_server(test, engine, **settings)


def test_models_are_listed_with_what_clients_look_for():
    status, body = get("/v1/models", served_model_names=("a", "org/b"))
    assert status == 200
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["a", "org/b"]
    card = body["data"][0]
    assert (card["object"], card["owned_by"], card["root"]) == ("model", "paged", "tiny")
    assert (card["parent"], card["max_model_len"]) == (None, 512)
    assert isinstance(card["created"], int)
    assert len(card["permission"]) == 1


@pytest.mark.parametrize("path", ["/v1/models/org/b", "/v1/models/org%2Fb"])
def test_one_model_is_found_by_its_name_with_a_slash(path):
    status, card = get(path, served_model_names=("a", "org/b"))
    assert (status, card["id"]) == (200, "org/b")


def test_unknown_model_card_is_404():
    status, body = get("/v1/models/other")
    assert status == 404
    assert checked_error(body, 404)["param"] == "model"


def test_version():
    assert get("/version") == (200, {"version": __version__})


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_200_and_empty_while_the_engine_lives(path):
    assert get(path) == (200, None)


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_503_when_the_engine_is_dead(path):
    status, body = get(path, FakeEngine(health=EngineDeadError("stuck in one step")))
    assert status == 503
    assert "stuck in one step" in checked_error(body, 503)["message"]


def test_ping_may_be_posted():
    async def test(client: Client) -> int:
        async with client.post("/ping") as response:
            return response.status

    assert with_server(test) == 200


async def reset(client: Client, query: str = "", **options) -> tuple[int, dict]:
    async with client.post(f"/reset_prefix_cache{query}", **options) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("query", "preempts"),
    [
        ("", False),
        ("?reset_running_requests=false", False),
        ("?reset_running_requests=0", False),
        ("?reset_running_requests=true", True),
        ("?reset_running_requests=True", True),
        ("?reset_running_requests=1&reset_external=true", True),
    ],
)
def test_prefix_cache_is_reset_in_dev_mode(query, preempts):
    engine = FakeEngine()
    got = with_server(lambda client: reset(client, query), engine, dev_mode=True)
    assert got == (200, {"success": True})
    assert engine.resets == [preempts]


def test_reset_says_that_running_requests_hold_blocks():
    engine = FakeEngine()
    engine.running = {"a": 1}
    assert with_server(reset, engine, dev_mode=True) == (200, {"success": False})


def test_reset_needs_a_yes_or_no():
    engine = FakeEngine()
    query = "?reset_running_requests=maybe"
    status, body = with_server(lambda client: reset(client, query), engine, dev_mode=True)
    error = checked_error(body, status)
    assert (status, error["param"]) == (400, "reset_running_requests")
    assert error["message"] == "reset_running_requests must be true or false, got 'maybe'."
    assert engine.resets == []


def test_reset_of_a_dead_engine_is_503():
    engine = FakeEngine(health=EngineDeadError("stuck"))
    status, body = with_server(reset, engine, dev_mode=True)
    assert "stuck" in checked_error(body, 503)["message"]
    assert status == 503


def test_reset_is_no_route_outside_dev_mode():
    engine = FakeEngine()
    status, body = with_server(reset, engine)
    assert "There is no route POST /reset_prefix_cache" in checked_error(body, 404)["message"]
    assert (status, engine.resets) == (404, [])


def test_reset_is_a_post():
    async def test(client: Client) -> int:
        async with client.get("/reset_prefix_cache") as response:
            return response.status

    assert with_server(test, dev_mode=True) == 405


def test_reset_needs_the_key():
    engine = FakeEngine()

    async def test(client: Client) -> list[int]:
        headers = {"Authorization": "Bearer right"}
        return [(await reset(client))[0], (await reset(client, headers=headers))[0]]

    assert with_server(test, engine, dev_mode=True, api_keys=("right",)) == [401, 200]
    assert engine.resets == [False]


def test_draining_server_refuses_work_and_says_so_to_its_probes():
    app = make_app(FakeEngine(), ServerSettings())
    app[CONTEXT].is_draining = True
    bodies = {
        COMPLETIONS: {"prompt": "a"},
        CHAT: {"messages": [{"role": "user", "content": "a"}]},
    }

    async def test(client: Client) -> list[tuple[int, dict]]:
        answers = []
        for path in ("/health", "/ping"):
            async with client.get(path) as response:
                answers.append((response.status, await response.json()))
        for path, body in bodies.items():
            async with client.post(path, json=body) as response:
                answers.append((response.status, await response.json()))
        async with client.get("/metrics") as response:
            assert response.status == 200
        return answers

    for status, body in with_server(test, app=app):
        assert status == 503
        error = checked_error(body, 503)
        assert error["type"] == "ServiceUnavailableError"
        assert "shutting down" in error["message"]


def test_load_counts_unfinished_requests():
    engine = FakeEngine()
    engine.running = {"a": 1, "b": 4}
    assert get("/load", engine) == (200, {"server_load": 2})


@pytest.mark.parametrize("path", ["/v1//models", "/v1///models", "/v1/models//tiny", "/v1/models/"])
def test_double_slashes_are_collapsed_and_last_ones_left_out(path):
    status, body = get(path)
    assert status == 200
    assert body["object"] in ("list", "model")


def test_double_slash_keeps_body_query_and_stream():
    async def test(client: Client) -> tuple[dict, bytes]:
        path = "/v1//chat//completions?x=1"
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        async with client.post(path, json=body) as response:
            whole = await response.json()
        async with client.post(path, json={**body, "stream": True}) as response:
            return whole, await response.read()

    whole, raw = with_server(test)
    assert whole["choices"][0]["message"]["content"] == "Th"
    assert raw.endswith(b"data: [DONE]\n\n")


def test_double_slash_of_unknown_route_is_404():
    assert get("/v1//nope")[0] == 404


def test_metrics_page_is_prometheus_text():
    async def test(client: Client) -> tuple[str, str]:
        async with client.get("/metrics") as response:
            return response.headers["Content-Type"], await response.text()

    kind, text = with_server(test, served_model_names=("served",))
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:num_requests_running{engine="0",model_name="served"} 0.0' in text


def test_refused_requests_are_not_counted():
    engine = FakeEngine()
    error_of(COMPLETIONS, {"prompt": "x", "temperature": -1}, engine)
    assert engine.seen == []


def test_requests_are_logged_without_their_prompt(caplog):
    caplog.set_level("INFO")
    ok(COMPLETIONS, {"prompt": "very secret", "request_id": "r1"}, log_requests=True)
    line = next(m for m in caplog.messages if m.startswith("Received request"))
    assert line.startswith("Received request cmpl-r1: params: SamplingParams(n=1")
    assert line.endswith(", lora_request: None.")
    assert "secret" not in caplog.text


def test_requests_are_not_logged_unless_asked(caplog):
    caplog.set_level("INFO")
    ok(COMPLETIONS, {"prompt": "a"})
    assert "Received" not in caplog.text


def test_model_s_sampling_defaults_are_announced_and_checked(caplog):
    caplog.set_level("INFO")
    make_app(FakeEngine(sampling_defaults={"temperature": 0.6}))
    assert "defaults from the model's generation_config.json: {'temperature': 0.6}" in caplog.text
    with pytest.raises(ValueError, match=r"cannot be served: temperature must be in \[0, 2\]"):
        make_app(FakeEngine(sampling_defaults={"temperature": 9}))


def test_broken_template_of_the_command_line_stops_the_start():
    with pytest.raises(ValueError, match="chat template has an error in line 1"):
        make_app(FakeEngine(), ServerSettings(chat_template="{% if %}"))
