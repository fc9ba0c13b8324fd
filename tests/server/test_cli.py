"""The command line: spellings, sizes, settings, help, messages; nothing is loaded here."""

import argparse
import dataclasses
import logging
import re
import subprocess
import sys

import pytest

from paged._version import __version__
from paged.models.demo import DEFAULT_CACHE_DIR
from paged.scheduler.config import EngineConfig
from paged.scheduler.eviction.policies import DEFAULT_POLICY, POLICIES
from paged.scheduler.prefix_cache import HASH_ALGORITHMS
from paged.scheduler.request_queue import SCHEDULING_POLICIES
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.server import cli_errors
from paged.server.cli import build_parser, main
from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_options import dashed, size
from paged.server.cli_settings import (
    engine_config,
    models_cache_dir,
    sampling_fields,
    server_settings,
    set_up_logging,
    tls_files,
)
from paged.server.settings import CorsSettings, PoolerConfig, ServerSettings
from paged.server.tls import TlsFiles
from tests.server.process import ROOT


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(dashed(arguments))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (
        "PAGED_API_KEY",
        "VLLM_API_KEY",
        "PAGED_CACHE_DIR",
        "PAGED_MODELS_CACHE",
        "PAGED_SERVER_DEV_MODE",
        "VLLM_SERVER_DEV_MODE",
    ):
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_those_of_the_settings():
    args = parse("serve")
    config = engine_config(args)
    cache_dir = config.compilation_cache_dir
    # A server bounds its queue; a program that fills its own does not need to.
    native_dir = config.native_cache_dir
    assert config == EngineConfig(
        compilation_cache_dir=cache_dir, native_cache_dir=native_dir, max_num_queued_reqs=1024
    )
    assert native_dir == cache_dir.replace("xla", "native")
    assert re.search(r"/\.cache/paged/xla$", cache_dir)
    assert server_settings(args) == ServerSettings()
    assert (args.model, args.host, args.port) == (None, "0.0.0.0", 8000)


# Of every setting of the engine: what the command line says, and what it means.
FLAGS: dict[str, tuple[str, object]] = {
    "max_model_len": ("4K", 4096),
    "max_num_seqs": ("32", 32),
    "max_num_batched_tokens": ("2k", 2000),
    "performance_mode": ("throughput", "throughput"),
    "block_size": ("32", 32),
    "gpu_memory_utilization": ("0.5", 0.5),
    "kv_cache_memory_bytes": ("2G", 2**31),
    "num_gpu_blocks_override": ("100", 100),
    "enable_prefix_caching": ("no", False),
    "kv_cache_dtype": ("float16", "float16"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int8", "int8"),
    "seed": ("7", 7),
    "attention_backend": ("xla", "xla"),
    "linear_backend": ("native", "native"),
    "max_num_queued_reqs": ("9", 9),
    "scheduling_policy": ("priority", "priority"),
    "enable_chunked_prefill": ("no", False),
    "long_prefill_token_threshold": ("1k", 1000),
    "max_num_partial_prefills": ("4", 4),
    "max_long_partial_prefills": ("2", 2),
    "async_scheduling": ("no", False),
    "prefix_cache_policy": ("arc", "arc"),
    "prefix_caching_hash_algo": ("sha256", "sha256"),
    "kv_offloading_size": ("1.5", 1.5),
    "kv_offloading_path": ("/tmp/kv", "/tmp/kv"),
    "kv_offloading_disk_size": ("10", 10.0),
    "disable_hybrid_kv_cache_manager": ("yes", True),
    "structured_outputs_config": (
        '{"backend": "guidance", "max_size": 100}',
        StructuredOutputsConfig(max_size=100),
    ),
    "kv_cache_metrics": ("yes", True),
    "kv_cache_metrics_sample": ("0.5", 0.5),
    "enable_mfu_metrics": ("yes", True),
    "generation_config": ("vllm", "vllm"),
    "compilation_cache_dir": ("/tmp/x", "/tmp/x"),
    "native_cache_dir": ("/tmp/n", "/tmp/n"),
    "tensor_parallel_size": ("2", 2),
    "enable_expert_parallel": ("yes", True),
    "enable_lora": ("yes", True),
    "max_loras": ("3", 3),
    "max_lora_rank": ("64", 64),
    "max_cpu_loras": ("5", 5),
    "lora_dtype": ("float32", "float32"),
    "lora_target_modules": ("q_proj", ("q_proj",)),
    "artifact": ("/tmp/a", "/tmp/a"),
}
# What only `serve` shows somebody.
OF_A_SERVER = {"kv_cache_metrics", "kv_cache_metrics_sample", "enable_mfu_metrics"}
NEEDS = {
    "kv_offloading_path": ["kv_offloading_size"],
    "kv_offloading_disk_size": ["kv_offloading_size", "kv_offloading_path"],
}


def spelt(field: str) -> str:
    text = FLAGS[field][0]
    name = field.replace("_", "-")
    return {"yes": f"--{name}", "no": f"--no-{name}"}.get(text, f"--{name}={text}")


def test_every_setting_of_the_engine_has_a_flag_of_its_name():
    assert list(FLAGS) == [field.name for field in dataclasses.fields(EngineConfig)]


@pytest.mark.parametrize(
    ("field", "command"),
    [
        (field, command)
        for field in FLAGS
        for command in ("serve", "chat", "generate")
        if command == "serve" or field not in OF_A_SERVER
    ],
)
def test_flag_of_the_engine_arrives(command, field):
    given = [field, *NEEDS.get(field, [])]
    before = engine_config(parse(command))
    expected = {name: FLAGS[name][1] for name in given}
    assert getattr(before, field) != expected[field], "would show nothing"
    after = engine_config(parse(command, *map(spelt, given)))
    assert after == dataclasses.replace(before, **expected)


def test_all_engine_options_together_arrive():
    # Without a prefix cache there is nothing to offload; exported programs take no adapters.
    apart = ("kv_offloading_size", "kv_offloading_path", "kv_offloading_disk_size", "artifact")
    expected = {name: value for name, (_, value) in FLAGS.items() if name not in apart}
    args = parse("serve", "a/model", *map(spelt, expected), "--revision=v1", "--hf-token=secret")
    assert engine_config(args) == EngineConfig(**expected)
    assert (args.model, args.revision, args.hf_token) == ("a/model", "v1", "secret")


def test_folder_of_evicted_blocks_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    args = parse("serve", "--kv-offloading-size=1", "--kv-offloading-path=~/kv")
    assert engine_config(args).kv_offloading_path == "/home/me/kv"


ABOUT_THE_MODEL = {
    "dtype",
    "seed",
    "attention_backend",
    "generation_config",
    "compilation_cache_dir",
    "native_cache_dir",
}


def test_operators_are_told_of_every_flag_of_memory_and_scheduling():
    page = (ROOT / "docs" / "serving.md").read_text()
    flags = [name.replace("_", "-") for name in FLAGS if name not in ABOUT_THE_MODEL]
    missing = [name for name in flags if not re.search(rf"`--(no-)?{name}\b", page)]
    missing += [name for name in (*POLICIES, *HASH_ALGORITHMS) if f"`{name}`" not in page]
    assert not missing, "explain these in docs/serving.md"


def test_only_generate_knows_its_queue_and_looks_ahead():
    policies = [engine_config(parse(c)).prefix_cache_policy for c in ("serve", "chat", "generate")]
    assert policies == [DEFAULT_POLICY, DEFAULT_POLICY, "lookahead"]
    chosen = engine_config(parse("generate", "--prefix-cache-policy=lru"))
    assert chosen.prefix_cache_policy == "lru"


@pytest.mark.parametrize("name", ["PAGED_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE"])
@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_dev_mode_comes_from_the_environment(monkeypatch, name, value, on):
    monkeypatch.setenv(name, value)
    assert server_settings(parse("serve")).dev_mode == on


def test_own_name_of_dev_mode_wins(monkeypatch):
    monkeypatch.setenv("PAGED_SERVER_DEV_MODE", "0")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert not server_settings(parse("serve")).dev_mode


def test_dev_mode_is_yes_or_no(monkeypatch, capsys):
    monkeypatch.setenv("PAGED_SERVER_DEV_MODE", "maybe")
    assert main(["serve", "--host", "127.0.0.1"]) == 1
    assert "$PAGED_SERVER_DEV_MODE=maybe must be 0 or 1." in capsys.readouterr().err


def test_every_server_option_arrives(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    args = parse(
        "serve",
        "--api-key",
        "a",
        "b",
        "--api-key",
        "c",
        "--served-model-name",
        "x",
        "y",
        "--metrics-require-key",
        "--no-cache-salt-per-key",
        "--no-ui",
        f"--chat-template={template}",
        "--trust-request-chat-template",
        "--client-max-size=1M",
        "--enable-log-requests",
        "--disable-log-stats",
        "--shutdown-timeout=5",
    )
    assert server_settings(args) == ServerSettings(
        served_model_names=("x", "y"),
        api_keys=("a", "b", "c"),
        metrics_require_key=True,
        cache_salt_per_key=False,
        ui=False,
        chat_template="{{ messages }}",
        trust_request_chat_template=True,
        client_max_size=2**20,
        log_requests=True,
        log_stats=False,
    )
    assert args.shutdown_timeout == 5


def test_underscores_are_understood_in_names_but_not_in_values():
    assert dashed(["--max_model_len=a_b", "--max_num_seqs", "my_model", "-x_y", "--", "a_b"]) == [
        "--max-model-len=a_b",
        "--max-num-seqs",
        "my_model",
        "-x_y",
        "--",
        "a_b",
    ]
    args = parse("serve", "my_model", "--max_model_len", "16k", "--no_enable_prefix_caching")
    assert (args.model, args.max_model_len) == ("my_model", 16_000)
    assert not args.enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("16k", 16_000),
        ("16K", 16_384),
        ("25.6k", 25_600),
        ("1m", 10**6),
        ("1M", 2**20),
        ("2g", 2 * 10**9),
        ("2G", 2**31),
    ],
)
def test_sizes(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1kk", "1T", "x", "1e3"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size; write 4096, 16k or 16K"):
        size(text)


def test_size_must_be_whole():
    with pytest.raises(argparse.ArgumentTypeError, match=r"'1\.5' is no whole number"):
        size("1.5")


@pytest.mark.parametrize("name", ["PAGED_API_KEY", "VLLM_API_KEY"])
def test_key_may_come_from_the_environment(monkeypatch, name):
    monkeypatch.setenv(name, "from-environment")
    assert server_settings(parse("serve")).api_keys == ("from-environment",)
    assert server_settings(parse("serve", "--api-key", "a")).api_keys == ("a",)


def test_cache_folder_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PAGED_CACHE_DIR", "/somewhere")
    assert engine_config(parse("serve")).compilation_cache_dir == "/somewhere/xla"
    assert engine_config(parse("serve", "--no-compilation-cache")).compilation_cache_dir is None


def test_folder_of_the_demo_model_may_come_from_the_environment(monkeypatch):
    assert models_cache_dir() is None
    monkeypatch.setenv("PAGED_MODELS_CACHE", "/somewhere")
    assert models_cache_dir() == "/somewhere"


def test_template_may_be_literal():
    args = parse("serve", "--chat-template", r"{{ messages }}\n")
    assert server_settings(args).chat_template == "{{ messages }}\n"


def test_template_file_must_exist():
    with pytest.raises(ValueError, match=r"no-such\.jinja: there is no such file, and it is no"):
        server_settings(parse("serve", "--chat-template", "no-such.jinja"))


def test_sampling_fields_leave_out_what_was_not_given():
    assert sampling_fields(parse("chat")) == {}
    assert sampling_fields(parse("generate")) == {"max_tokens": 128}
    options = ["--temperature=0", "--stop", "a", "--stop", "b", "--sampling-seed=0"]
    assert sampling_fields(parse("chat", *options)) == {
        "temperature": 0.0,
        "stop": ["a", "b"],
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["nope"], "invalid choice: 'nope'"),
        (["serve", "--nope"], "unrecognized arguments: --nope"),
        # Abbreviations would change meaning when an option is added.
        (["serve", "--max-model", "5"], "unrecognized arguments: --max-model"),
        (["serve", "--port", "70000"], "argument --port: '70000' is no port"),
        (["serve", "--port", "http"], "argument --port: 'http' is no port"),
        (["serve", "--max-model-len", "long"], "argument --max-model-len: 'long' is no size"),
        (["serve", "--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (["serve", "--attention-backend", "x"], "argument --attention-backend: invalid choice"),
        (
            ["serve", "--prefix-cache-policy", "x"],
            f"(choose from {', '.join(map(repr, POLICIES))})",
        ),
        (
            ["serve", "--prefix-caching-hash-algo", "md5"],
            f"(choose from {', '.join(map(repr, HASH_ALGORITHMS))})",
        ),
        (["serve", "--scheduling-policy", "x"], "(choose from 'fcfs', 'priority')"),
        (
            ["serve", "--structured-outputs-config", "{"],
            "argument --structured-outputs-config: '{'",
        ),
        (["serve", "--structured-outputs-config", '{"depth": 3}'], "unknown 'depth'; known are"),
        (["serve", "--structured-outputs-config", '{"max_size": "x"}'], "Expected `int`"),
        (["serve", "--structured-outputs-config", '{"max_depth": 0}'], "must be above 0"),
        (["serve", "--structured-outputs-config", '{"backend": "outlines"}'], "is guidance"),
        (["serve", "--kv-offloading-size", "4G"], "'4G' is no number of GiB; write 4 or 0.5"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "0"], "block_size=0 must be at least 1."),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization=1.5 must be in (0, 1]."),
        (
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            "max_num_batched_tokens=8 must be at least max_num_seqs=9",
        ),
        (["--kv-offloading-size", "-1"], "kv_offloading_size=-1.0 must be a number of GiB"),
        (["--kv-offloading-size", "nan"], "kv_offloading_size=nan must be a number of GiB"),
        (["--kv-offloading-path", "/kv"], "kv_offloading_path='/kv' needs kv_offloading_size"),
        (
            ["--kv-offloading-size", "1", "--kv-offloading-disk-size", "9"],
            "kv_offloading_disk_size says how much of kv_offloading_path may be used",
        ),
        (
            ["--kv-offloading-size", "1", "--no-enable-prefix-caching"],
            "kv_offloading_size needs enable_prefix_caching",
        ),
        (["--max-num-partial-prefills", "0"], "max_num_partial_prefills=0 must be at least 1."),
        (
            ["--max-num-partial-prefills", "1", "--max-long-partial-prefills", "2"],
            "max_long_partial_prefills=2 must not exceed max_num_partial_prefills=1",
        ),
        (["--client-max-size", "0"], "client_max_size=0 must be at least 1 byte."),
        (["--api-key", ""], "api_keys must not hold an empty string."),
        (["--chat-template", "/no/such/file"], "there is no such file"),
    ],
)
def test_contradicting_settings_are_one_line(capsys, arguments, message):
    assert main(["serve", "--host", "127.0.0.1", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paged: error: ")
    assert message in line


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_version(capsys, option):
    with pytest.raises(SystemExit) as exit_info:
        main([option])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"paged {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_help_shows_defaults_and_groups(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for group in ("model:", "memory:", "prefix cache:", "scheduling:", "logging:"):
        assert f"\n{group}\n" in text
    words = " ".join(text.split())
    assert "type of weights and activations (default: auto)" in words
    assert "reuse the KV of prompts that begin alike (default: on)" in words
    assert "(default: None)" not in words
    assert "$PAGED_MODELS_CACHE is the folder" in words
    for choices in (POLICIES, HASH_ALGORITHMS, SCHEDULING_POLICIES):
        assert "{" + ",".join(choices) + "}" in words
    assert f"(default: {DEFAULT_CACHE_DIR})" in words
    assert max(map(len, text.splitlines())) <= 100


def test_help_begins_with_what_a_command_is_for(capsys):
    for command in ("serve", "run-batch", "compile", "plan", "simulate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage, blank, description, *_ = capsys.readouterr().out.splitlines()
        assert usage.startswith(f"usage: paged {command} [options]")
        assert (blank, description[0].isupper()) == ("", True)
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "paged COMMAND --help" in text
    assert "(default: False)" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_needs_neither_jax_nor_aiohttp():
    script = (
        "import sys\n"
        "from paged.server.cli import build_parser\n"
        "build_parser().format_help()\n"
        "heavy = {'jax', 'flax', 'numpy', 'aiohttp', 'tokenizers', 'jinja2', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


def test_interruption_exits_with_130(monkeypatch):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "paged.server.cli_serve", argparse.Namespace(run=interrupt))
    assert main(["serve"]) == 130


def test_closed_output_is_no_traceback(monkeypatch):
    def write(_args):
        raise BrokenPipeError

    monkeypatch.setitem(sys.modules, "paged.server.cli_generate", argparse.Namespace(run=write))
    assert main(["generate", "-p", "x"]) == 1


@pytest.mark.parametrize(
    "error", [ValueError("a\n  b"), NotImplementedError("a b"), FileNotFoundError("a b")]
)
def test_what_a_user_can_cause_becomes_one_line(error, caplog):
    caplog.set_level("DEBUG", logger=cli_errors.__name__)
    with pytest.raises(UserError, match=r"^a b$"), user_errors():
        raise error
    assert caplog.records[0].exc_info is not None, "the traceback is for --log-level debug"


def test_own_mistakes_keep_their_traceback():
    with pytest.raises(ZeroDivisionError, match="mine"), user_errors():
        raise ZeroDivisionError("mine")


def test_logging_shows_own_messages_and_the_libraries_warnings():
    script = (
        "import logging\n"
        "from paged.server.cli_settings import set_up_logging\n"
        "set_up_logging('info')\n"
        "logging.getLogger('paged.x').info('own')\n"
        "logging.getLogger('other').info('chatter')\n"
        "logging.getLogger('other').warning('warning')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == ""
    lines = [re.sub(r"\d\d:\d\d:\d\d", "TIME", line) for line in run.stderr.splitlines()]
    assert lines == ["INFO TIME paged.x: own", "WARNING TIME other: warning"]


def test_log_level_is_that_of_the_command():
    assert parse("serve").log_level == "info"
    assert parse("chat").log_level == "warning"


def test_commands_for_one_user_compile_for_few_sequences():
    assert [parse(name).max_num_seqs for name in ("serve", "chat", "generate")] == [None, 8, 8]
    assert parse("chat", "--max-num-seqs", "32").max_num_seqs == 32
    set_up_logging("error")
    assert logging.getLogger("paged").level == logging.ERROR


def test_open_server_without_key_is_warned_about(caplog, monkeypatch):
    from paged.server import cli_serve

    def stop(_host, _port):
        raise UserError("stop here")

    monkeypatch.setattr(cli_serve, "reserve_port", stop)
    assert main(["serve"]) == 1
    assert "Anyone who reaches 0.0.0.0 may use this server" in caplog.text
    caplog.clear()
    assert main(["serve", "--api-key", "k"]) == 1
    assert main(["serve", "--host", "127.0.0.1"]) == 1
    assert "Anyone" not in caplog.text


def test_what_flags_say_about_clients_and_the_network_reaches_the_settings():
    settings = server_settings(
        parse(
            *("serve", "--max-prompts=2", "--max-n=3", "--max-logprobs=4", "--max-stop-strings=5"),
            *("--max-concurrent-streams=6", "--max-requests-per-minute=7", "--body-timeout=8"),
            *("--write-timeout=9", "--root-path=/llm/", "--enable-request-id-headers"),
            *("--sse-keep-alive-interval=1.5", "--stream-interval=2", "--response-role=model"),
            *("--enable-force-include-usage", "--return-tokens-as-token-ids"),
            *("--override-generation-config", '{"top_k": 5}', "--allow-credentials"),
            *("--allowed-origins", '["https://a", "https://b"]', "--allowed-methods", "GET"),
            *("--allowed-headers", '["authorization"]'),
            *("--chat-template-content-format=openai",),
            *("--pooler-config", '{"pooling_type": "MEAN", "normalize": false}'),
            *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        )
    )
    assert settings == ServerSettings(
        pooler_config=PoolerConfig(pooling="mean", normalize=False),
        max_prompts=2,
        max_n=3,
        max_logprobs=4,
        max_stop_strings=5,
        max_concurrent_streams=6,
        max_requests_per_minute=7,
        body_timeout_seconds=8.0,
        write_timeout_seconds=9.0,
        root_path="/llm",
        request_id_headers=True,
        sse_keep_alive_seconds=1.5,
        stream_interval=2,
        response_role="model",
        force_include_usage=True,
        return_tokens_as_token_ids=True,
        override_generation_config={"top_k": 5},
        chat_template_content_format="openai",
        default_chat_template_kwargs={"enable_thinking": False},
        cors=CorsSettings(
            origins=("https://a", "https://b"),
            methods=("GET",),
            headers=("authorization",),
            allow_credentials=True,
        ),
    )


def test_tls_flags_become_files_and_need_a_certificate():
    files = ("--ssl-certfile=c", "--ssl-keyfile=k", "--ssl-ca-certs=a", "--ssl-cert-reqs=2")
    assert tls_files(parse("serve", *files, "--ssl-ciphers=HIGH")) == TlsFiles(
        certfile="c", keyfile="k", ca_certs="a", requires_client_certificate=True, ciphers="HIGH"
    )
    assert tls_files(parse("serve")) is None
    with pytest.raises(ValueError, match="give --ssl-certfile, too"):
        tls_files(parse("serve", "--ssl-keyfile=k"))
    with pytest.raises(ValueError, match="--ssl-cert-reqs needs --ssl-ca-certs"):
        tls_files(parse("serve", "--ssl-certfile=c", "--ssl-cert-reqs=1"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--allowed-origins", "[1]"], "is no JSON list of strings"),
        (["--allowed-origins", "["], "is no JSON list of strings"),
        (["--override-generation-config", "{"], "is no JSON:"),
        (["--override-generation-config", "[]"], "is no JSON object"),
        (["--body-timeout", "-1"], "is no number of seconds"),
        (["--write-timeout", "soon"], "is no number of seconds"),
        (["--ssl-cert-reqs", "3"], "invalid choice"),
    ],
)
def test_values_that_mean_nothing_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit):
        parse("serve", *arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed|truncated"),
        ('{"pooling_type": "CLS"}', "pooling_type 'CLS' is unknown; choose LAST, MEAN"),
        ('{"pooling": "MEAN"}', "unknown field `pooling`"),
        ('{"pooling_type": "LAST", "seq_pooling_type": "MEAN"}', "give one of them"),
    ],
)
def test_pooler_configs_that_mean_nothing_are_refused(capsys, text, message):
    with pytest.raises(SystemExit):
        parse("serve", "--pooler-config", text)
    assert re.search(message, capsys.readouterr().err)
