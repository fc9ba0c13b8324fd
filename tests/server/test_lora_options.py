"""The command line's LoRA adapters: which there are, how much room for them, who may load more."""

import asyncio

import pytest

from paged.models.errors import AdapterMismatchError
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import EngineDeadError
from paged.server import cli_engine
from paged.server.cli import build_parser, main
from paged.server.cli_errors import UserError
from paged.server.cli_serve import reserve_port, serve_until_stopped
from paged.server.cli_settings import engine_config, server_settings
from paged.server.settings import LoRAModule, ServerSettings
from tests.server.fake_engine import FakeEngine

SWITCHES = ("PAGED_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
OWN, VLLMS = SWITCHES


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (*SWITCHES, "PAGED_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def parse(*arguments: str):
    return build_parser().parse_args(arguments)


def test_flags_become_settings_of_the_engine():
    config = engine_config(
        parse(
            *("serve", "--enable-lora", "--max-loras=3", "--max-lora-rank=64", "--max-cpu-loras=5"),
            *("--lora-dtype=float32", "--lora-target-modules", "q_proj", "v_proj"),
        )
    )
    assert (config.enable_lora, config.max_loras, config.max_lora_rank) == (True, 3, 64)
    assert (config.max_cpu_loras, config.lora_dtype) == (5, "float32")
    assert config.lora_target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "compile", "run-batch"])
def test_adapters_are_off_by_default(command):
    required = {"compile": ["--out=x"], "run-batch": ["-i=x", "-o=y"]}.get(command, [])
    assert not engine_config(parse(command, *required)).enable_lora
    assert EngineConfig().enable_lora is False


def test_adapters_of_the_command_line_are_served_and_turn_them_on():
    args = parse(
        *("serve", "--lora-modules", "sql=/a=b", '{"name": "law", "path": "~/law"}'),
        *("--lora-modules", '{"name": "x", "path": "org/x", "base_model_name": "llama"}'),
    )
    sql, law, other = server_settings(args).lora_modules
    assert sql == LoRAModule(name="sql", path="/a=b")
    assert law.path.endswith("/law")
    assert "~" not in law.path
    assert other == LoRAModule(name="x", path="org/x", base_model_name="llama")
    assert engine_config(args).enable_lora
    with pytest.raises(ValueError, match="--no-enable-lora contradicts the adapters"):
        engine_config(parse("serve", "--no-enable-lora", "--lora-modules", "a=/a"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-modules", "sql"], "'sql' is no adapter; write NAME=PATH"),
        (["--lora-modules", "=/a"], "is no adapter"),
        (["--lora-modules", "a="], "is no adapter"),
        (["--lora-modules", "a\n=/a"], "is no adapter"),
        (["--lora-modules", '{"name": "a"}'], "missing required field `path`"),
        (["--lora-modules", '{"name": "a", "path": "/a", "rank": 1}'], "unknown field `rank`"),
        (["--lora-modules", '{"name"'], "Input data was truncated"),
        (["--max-lora-rank", "7"], "invalid choice: 7"),
        (["--max-loras", "0"], "at least 1"),
        (["--max-cpu-loras", "0"], "at least 1"),
        (["--lora-dtype", "int8"], "invalid choice"),
    ],
)
def test_values_that_mean_nothing_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit):
        parse("serve", *arguments)
    assert words in capsys.readouterr().err


def test_what_would_shard_further_is_refused_with_the_reason(capsys):
    assert main(["serve", "--host=127.0.0.1", "--fully-sharded-loras"]) == 1
    assert "--fully-sharded-loras is not supported: over several" in capsys.readouterr().err


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_clients_may_load_adapters_if_the_environment_says_so(monkeypatch, name, value, on):
    monkeypatch.setenv(name, value)
    assert server_settings(parse("serve")).allow_runtime_lora_updating == on


def test_the_own_name_wins_and_says_yes_or_no(monkeypatch):
    monkeypatch.setenv(VLLMS, "1")
    monkeypatch.setenv(OWN, "0")
    assert server_settings(parse("serve")) == ServerSettings()
    monkeypatch.setenv(OWN, "maybe")
    with pytest.raises(ValueError, match=rf"\${OWN}=maybe must be 0 or 1"):
        server_settings(parse("serve"))


def test_one_adapter_of_a_command_is_its_model():
    args = parse("generate", "--lora", "/adapters/sql")
    assert engine_config(args).enable_lora
    engine = FakeEngine()

    async def ask() -> list[str]:
        serving = cli_engine.serve_privately(engine, lora_modules=[args.lora], model=args.lora.name)
        async with serving as client:
            return [text async for _, text, _ in client.complete(["Hi"], {"max_tokens": 3})]

    assert "".join(asyncio.run(ask())) == "The"
    (seen,) = engine.seen
    assert seen.lora is not None
    assert seen.lora.lora_path == "/adapters/sql"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_adapter_for_a_server_elsewhere_is_refused(command, capsys):
    message = {"chat": "-q", "generate": "-p"}[command]
    assert main([command, "--url", "http://x", "--lora", "/a", message, "Hi"]) == 1
    assert "name one that the server has as MODEL" in capsys.readouterr().err


def test_an_adapter_that_cannot_be_loaded_is_one_line():
    engine = FakeEngine(refuse_adapter=FileNotFoundError("nothing at /a"))

    async def ask() -> None:
        async with cli_engine.serve_privately(
            engine, lora_modules=[LoRAModule(name="a", path="/a")]
        ):
            pass

    with pytest.raises(UserError, match="adapter 'a' cannot be served: nothing at /a"):
        asyncio.run(ask())


def test_a_server_that_cannot_load_its_adapter_ends_with_one_line_and_its_engine():
    engine = FakeEngine(refuse_adapter=AdapterMismatchError("It is an adapter of another model."))

    async def start() -> FakeEngine:
        return engine

    async def serve() -> None:
        settings = ServerSettings(lora_modules=(LoRAModule(name="a", path="/a"),))
        with reserve_port("127.0.0.1", 0) as listener:
            await serve_until_stopped(start, settings, listener, shutdown_timeout=1)

    with pytest.raises(
        UserError, match="adapter 'a' cannot be served: It is an adapter of another model"
    ):
        asyncio.run(serve())
    with pytest.raises(EngineDeadError):
        engine.check_health()
