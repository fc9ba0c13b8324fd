"""Flags and environment of traces, logs and profiles become settings, or are refused."""

import pytest

from paged.scheduler.config import EngineConfig
from paged.server.cli import build_parser
from paged.server.cli_settings import engine_config, server_settings
from paged.server.observability import ObservabilitySettings

URL = "http://localhost:4318/v1/traces"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GENERAL_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def settings(*argv: str) -> ObservabilitySettings:
    return server_settings(build_parser().parse_args(["serve", *argv])).observability


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (PROTOCOL, GENERAL_PROTOCOL, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_everything_is_off_by_default():
    assert settings() == ObservabilitySettings()


def test_every_option_arrives(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("HOME", "/home/me")
    assert settings(
        f"--otlp-traces-endpoint={URL}",
        "--collect-detailed-traces=model",
        "--max-log-len=2k",
        "--profile-dir=~/profiles",
    ) == ObservabilitySettings(
        otlp_traces_endpoint=URL,
        service_name="mine",
        detailed_traces=frozenset({"host_copies"}),
        max_log_len=2000,
        profile_dir="/home/me/profiles",
    )


@pytest.mark.parametrize("text", ["all", "model,worker", "worker,model,all"])
def test_all_details(text):
    got = settings(f"--otlp-traces-endpoint={URL}", f"--collect-detailed-traces={text}")
    assert got.detailed_traces == {"host_copies", "detokenize"}


@pytest.mark.parametrize("text", ["", "gpu", "model,", "all,gpu"])
def test_unknown_modules_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        settings(f"--otlp-traces-endpoint={URL}", f"--collect-detailed-traces={text}")
    assert "known are model, worker and all" in capsys.readouterr().err


def test_details_of_no_traces_are_refused():
    with pytest.raises(ValueError, match="detailed_traces needs otlp_traces_endpoint"):
        settings("--collect-detailed-traces=all")


def test_protocol_is_that_of_the_endpoint_or_of_the_environment(monkeypatch):
    def protocol(url: str) -> str:
        return settings(f"--otlp-traces-endpoint={url}").otlp_protocol

    assert (protocol(URL), protocol("grpc://a:4317")) == ("http/protobuf", "grpc")
    monkeypatch.setenv(GENERAL_PROTOCOL, "grpc")
    assert (protocol("http://a:4317"), protocol("grpcs://a:4317")) == ("grpc", "grpc")
    monkeypatch.setenv(PROTOCOL, "http/protobuf")  # the more special one counts
    assert (protocol(URL), protocol("grpc://a:4317")) == ("http/protobuf", "grpc")


def test_other_protocols_are_refused_only_where_there_are_traces(monkeypatch):
    monkeypatch.setenv(PROTOCOL, "http/json")
    assert settings().otlp_traces_endpoint is None
    known = "set it to one of http/protobuf, grpc"
    with pytest.raises(ValueError, match=rf"{PROTOCOL}=http/json is not known; {known}"):
        settings(f"--otlp-traces-endpoint={URL}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"otlp_protocol": "udp"}, "otlp_protocol='udp' is none of http/protobuf, grpc"),
        ({"otlp_traces_endpoint": "grpc://a"}, "otlp_traces_endpoint='grpc://a' must be a URL"),
        ({"otlp_traces_endpoint": "a:4317"}, "otlp_traces_endpoint='a:4317' must be a URL"),
    ],
)
def test_settings_of_traces_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ObservabilitySettings(**fields)


def test_metrics_on_demand_are_settings_of_the_engine():
    def config(*argv: str) -> EngineConfig:
        return engine_config(build_parser().parse_args(argv))

    on = config(
        "serve", "--kv-cache-metrics", "--kv-cache-metrics-sample=0.5", "--enable-mfu-metrics"
    )
    assert (on.kv_cache_metrics, on.kv_cache_metrics_sample, on.enable_mfu_metrics) == (
        True,
        0.5,
        True,
    )
    off = config("generate")  # where nobody would see them
    assert (off.kv_cache_metrics, off.enable_mfu_metrics) == (False, False)


def test_a_sample_of_no_blocks_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_metrics_sample=0.0 must be in \(0, 1\]"):
        EngineConfig(kv_cache_metrics_sample=0.0)
