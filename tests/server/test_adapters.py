"""LoRA adapters over HTTP: which model a request names, and loading at run time."""

import asyncio
from typing import Any

import pytest

from paged.models.errors import (
    AdapterMismatchError,
    AdapterNotFoundError,
    UnsupportedAdapterError,
)
from paged.scheduler.config import EngineConfig
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.output import StepStats
from paged.scheduler.params import ParameterError
from paged.server.app import make_app, make_runner
from paged.server.metrics import EngineMetrics
from paged.server.settings import LoRAModule, ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import CHAT, COMPLETIONS, Client, checked_error, error_of, ok, with_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
MODULES = (
    LoRAModule(name="sql", path="/adapters/sql"),
    LoRAModule(name="org/law", path="org/law-lora", base_model_name="llama"),
)
SQL = LoRARequest(lora_name="sql", lora_path="/adapters/sql")
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: ASK,
    RESPONSES: {"input": "a", "max_output_tokens": 2},
    EMBEDDINGS: {"input": "a"},
}


async def send(
    client: Client, method: str, path: str, body: Any = None
) -> tuple[int, str, dict[str, Any] | None]:
    """Return status, text and, of JSON, the body of an answer."""
    async with client.request(method, path, json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.text(), await response.json() if is_json else None


def run_time(test, engine: FakeEngine | None = None, **settings: Any):
    """Run a test where adapters may be loaded and unloaded."""
    return with_server(test, engine, allow_runtime_lora_updating=True, **settings)


@pytest.mark.parametrize(
    ("path", "stream"),
    [*((path, False) for path in BODIES), *((path, True) for path in BODIES if path != EMBEDDINGS)],
)
def test_a_request_s_model_chooses_the_adapter(path, stream):
    engine = FakeEngine()

    async def test(client: Client) -> None:
        for name in ("sql", "org/law", "tiny", None):
            body = {**BODIES[path], "model": name, **({"stream": True} if stream else {})}
            status, text, _ = await send(client, "POST", path, body)
            assert status == 200, text
            assert f'"model":"{name or "tiny"}"' in text

    with_server(test, engine, lora_modules=MODULES)
    paths = [seen.lora and seen.lora.lora_path for seen in engine.seen]
    assert paths == ["/adapters/sql", "org/law-lora", None, None]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", *BODIES])
def test_an_unknown_name_is_404_and_told_which_there_are(path):
    texts = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [65]}}
    body = {**BODIES.get(path, {}), **texts.get(path, {})}
    error = error_of(path, {**body, "model": "SQL"}, status=404, lora_modules=MODULES)
    assert error["param"] == "model"
    assert error["message"] == (
        "The model `SQL` does not exist. Valid aliases: tiny, sql, org/law."
    )
    ok(path, {**body, "model": "sql"}, lora_modules=MODULES)


def test_adapters_are_listed_after_all_names_of_the_base_model():
    async def test(client: Client) -> tuple[dict, dict]:
        _, _, models = await send(client, "GET", "/v1/models")
        _, _, card = await send(client, "GET", "/v1/models/org/law")
        assert models is not None
        assert card is not None
        return models, card

    models, card = with_server(test, lora_modules=MODULES, served_model_names=("a", "b"))
    shown = [(c["id"], c["root"], c["parent"], c["max_model_len"]) for c in models["data"]]
    assert shown == [
        ("a", "tiny", None, 512),
        ("b", "tiny", None, 512),
        ("sql", "/adapters/sql", "a", None),
        ("org/law", "org/law-lora", "llama", None),
    ]
    assert card == models["data"][3]
    assert {key: type(value) for key, value in card.items()} == {
        **{key: type(value) for key, value in models["data"][0].items()},
        "parent": str,
        "max_model_len": type(None),
    }


def start(*modules: LoRAModule, refusal: Exception | None = None) -> None:
    """Start a server with these adapters, and stop it."""

    async def run() -> None:
        engine = FakeEngine(refuse_adapter=refusal)
        runner = make_runner(make_app(engine, ServerSettings(lora_modules=modules)))
        try:
            await runner.setup()
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_a_server_does_not_start_with_an_adapter_that_cannot_be_loaded():
    start(*MODULES)
    with pytest.raises(ValueError, match="adapter 'sql' cannot be served: There is nothing at"):
        start(*MODULES, refusal=AdapterNotFoundError("There is nothing at /adapters/sql."))
    with pytest.raises(
        ValueError, match="adapter 'sql' cannot be served: The lora adapter 'sql' has alr"
    ):
        start(*MODULES, LoRAModule(name="sql", path="/b"))
    with pytest.raises(
        ValueError, match="adapter 'tiny' cannot be served: The name 'tiny' is that of"
    ):
        start(LoRAModule(name="tiny", path="/b"))


def test_an_adapter_comes_and_goes():
    engine = FakeEngine()

    async def test(client: Client) -> None:
        load = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        added = await send(client, "POST", LOAD, load)
        assert added == (200, "Success: LoRA adapter 'sql' added successfully.", None)
        _, _, models = await send(client, "GET", "/v1/models")
        assert models is not None
        assert [card["id"] for card in models["data"]] == ["tiny", "sql"]
        ask = {"prompt": "a", "max_tokens": 1, "model": "sql"}
        assert (await send(client, "POST", COMPLETIONS, ask))[0] == 200
        body = {"lora_name": "sql", "lora_int_id": 3}
        removed = await send(client, "POST", UNLOAD, body)
        assert removed == (200, "Success: LoRA adapter 'sql' removed successfully.", None)
        assert engine.adapters == {}
        assert (await send(client, "POST", COMPLETIONS, ask))[0] == 404
        assert (await send(client, "POST", LOAD, load))[0] == 200

    run_time(test, engine)
    assert [seen.lora for seen in engine.seen] == [SQL]


def test_an_adapter_in_place_of_another_of_its_name():
    engine = FakeEngine()

    async def test(client: Client) -> None:
        again = {"lora_name": "sql", "lora_path": "/new"}
        status, _, body = await send(client, "POST", LOAD, again)
        assert body is not None
        error = checked_error(body, 400)
        assert (status, error["type"]) == (400, "InvalidUserInput")
        assert error["message"] == (
            "The lora adapter 'sql' has already been loaded. If you want to load the adapter in "
            "place, set 'load_inplace' to True."
        )
        engine.refuse_adapter = AdapterMismatchError("Not of this model.")
        assert (await send(client, "POST", LOAD, {**again, "load_inplace": True}))[0] == 500
        ask = {"prompt": "a", "max_tokens": 1, "model": "sql"}
        await send(client, "POST", COMPLETIONS, ask)
        engine.refuse_adapter = None
        assert (await send(client, "POST", LOAD, {**again, "load_inplace": True}))[0] == 200
        await send(client, "POST", COMPLETIONS, ask)

    run_time(test, engine, lora_modules=MODULES)
    paths = [seen.lora.lora_path for seen in engine.seen if seen.lora is not None]
    assert paths == ["/adapters/sql", "/new"], "one that cannot be used replaces none"


def test_of_two_that_load_the_same_name_at_once_one_is_refused():
    async def test(client: Client) -> list[int]:
        bodies = [{"lora_name": "sql", "lora_path": path} for path in ("/a", "/b")]
        answers = await asyncio.gather(*(send(client, "POST", LOAD, body) for body in bodies))
        return sorted(status for status, _, _ in answers)

    assert run_time(test) == [200, 400]


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "a"}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path'"),
        ({"lora_name": "", "lora_path": "/a"}, 400, "InvalidUserInput", "Both 'lora_name'"),
        ({"lora_name": "tiny", "lora_path": "/a"}, 400, "InvalidUserInput", "the base model"),
        ({"lora_name": "a\n", "lora_path": "/a"}, 400, "Bad Request", "lora_name: "),
        ({"lora_name": 1, "lora_path": "/a"}, 400, "Bad Request", "lora_name: Expected `str"),
        (
            {"lora_name": "a", "lora_path": "/a", "is_3d_lora_weight": True},
            *(400, "BadRequestError", "is_3d_lora_weight is not supported"),
        ),
    ],
)
def test_a_load_that_asks_for_nonsense_is_refused(body, status, kind, message):
    engine = FakeEngine()
    error = error_of(LOAD, body, engine, status, allow_runtime_lora_updating=True)
    assert error["type"] == kind
    assert message in error["message"]
    assert engine.adapters == {}


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (AdapterNotFoundError("There is nothing at /a."), 404, "NotFoundError"),
        (AdapterMismatchError("It is of another model."), 500, "InternalServerError"),
        (UnsupportedAdapterError("It has rank 64; raise it."), 500, "InternalServerError"),
        (PermissionError("/a cannot be read."), 500, "InternalServerError"),
        (ParameterError("lora", "a", "needs --enable-lora"), 500, "InternalServerError"),
    ],
)
def test_why_an_adapter_cannot_be_loaded_is_told(refusal, status, kind):
    engine = FakeEngine(refuse_adapter=refusal)
    body = {"lora_name": "a", "lora_path": "/a"}
    error = error_of(LOAD, body, engine, status, allow_runtime_lora_updating=True)
    assert (error["type"], error["message"]) == (kind, str(refusal))


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"lora_name": "a"}, 404, "NotFoundError", "The lora adapter 'a' cannot be found."),
        ({"lora_name": "tiny"}, 404, "NotFoundError", "The lora adapter 'tiny' cannot be found."),
        ({}, 400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter."),
        ({"lora_name": ""}, 400, "InvalidUserInput", "'lora_name' needs to be provided"),
    ],
)
def test_an_unload_of_nothing_is_refused(body, status, kind, message):
    error = error_of(UNLOAD, body, None, status, allow_runtime_lora_updating=True)
    assert error["type"] == kind
    assert message in error["message"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_without_leave_there_are_no_routes_to_load_and_unload(path):
    error = error_of(path, {"lora_name": "a", "lora_path": "/a"}, status=404)
    assert error["message"] == f"There is no route POST {path}."


def test_a_server_that_stops_loads_nothing():
    async def test(client: Client) -> int:
        from paged.server.context import CONTEXT

        client.app[CONTEXT].is_draining = True
        return (await send(client, "POST", LOAD, {"lora_name": "a", "lora_path": "/a"}))[0]

    assert run_time(test) == 503


def test_an_adapter_whose_files_are_gone_is_told_to_whoever_names_it():
    engine = FakeEngine(refuse=AdapterNotFoundError("There is nothing at /adapters/sql."))
    body = {"prompt": "a", "model": "sql"}
    error = error_of(COMPLETIONS, body, engine, 500, lora_modules=MODULES)
    assert error["message"].endswith("any more: There is nothing at /adapters/sql.")


def test_the_log_of_requests_names_the_adapter(caplog):
    caplog.set_level("INFO")
    body = {"prompt": "a", "max_tokens": 1, "model": "sql"}
    ok(COMPLETIONS, body, lora_modules=MODULES, log_requests=True)
    line = next(m for m in caplog.messages if m.startswith("Received request"))
    assert "lora_request: LoRARequest(lora_name='sql'" in line


def gauges(page: bytes) -> list[str]:
    return [x for x in page.decode().splitlines() if x.startswith("vllm:lora_requests_info{")]


def test_the_gauge_names_the_adapters_of_requests():
    metrics = EngineMetrics("m", 512, {}, max_loras=2)
    for running, waiting in [(("a", "b"), ("c",)), (("b",), ())]:
        stats = StepStats(
            num_running=2,
            num_waiting=1,
            kv_cache_usage=0.0,
            running_loras=running,
            waiting_loras=waiting,
        )
        metrics.observe(stats)
        (series,) = gauges(metrics.render())
        labels, _, value = series.partition(" ")
        assert labels == (
            f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{",".join(running)}",'
            f'waiting_lora_adapters="{",".join(waiting)}"}}'
        )
        assert float(value) > 1.7e9


@pytest.mark.parametrize("enable_lora", [False, True])
def test_the_gauge_is_there_if_adapters_can_be(enable_lora):
    async def test(client: Client) -> bytes:
        async with client.get("/metrics") as response:
            return await response.read()

    engine = FakeEngine(config=EngineConfig(enable_lora=enable_lora))
    assert len(gauges(with_server(test, engine))) == enable_lora
