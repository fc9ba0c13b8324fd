"""Traces as they arrive at a collector; nothing is traced, nor imported, unless asked for."""

import asyncio
import itertools
import re
import subprocess
import sys
import time

import pytest

from paged.scheduler.startup import Phase
from paged.server.app import make_app
from paged.server.observability import ObservabilitySettings
from paged.server.settings import ServerSettings
from tests.scheduler.fakes import spell
from tests.scheduler.tap import Tap
from tests.server.collector import Collector, attributes, collector, grpc_collector, seconds
from tests.server.fake_engine import FakeEngine
from tests.server.fake_serving import with_engine
from tests.server.process import ROOT
from tests.server.serving import COMPLETIONS, Client

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
HELLO = spell("hello")
BODY = {"prompt": "abcdef", "max_tokens": 4, "temperature": 0.5, "top_p": 0.75}


def slow(request):
    time.sleep(0.004)
    return ord("a")


async def text(client: Client, path: str) -> str:
    async with client.get(path) as response:
        return await response.text()


def traced(
    test, script=HELLO, *, details=frozenset(), phases=(), fail_at=None, protocol="http/protobuf"
) -> Collector:
    """Run a test against a traced server and return what the collector got."""
    with (grpc_collector if protocol == "grpc" else collector)() as spans:
        settings = ServerSettings(
            observability=ObservabilitySettings(
                otlp_traces_endpoint=spans.url,
                otlp_protocol=protocol,
                service_name="mine",
                detailed_traces=details,
            )
        )
        with_engine(test, script, settings, phases=phases, fail_at=fail_at)
    return spans


def asking(body: dict, status: int = 200, headers: dict | None = None):
    """Return a test that asks once, and keeps the headers of the answer."""

    async def test(client: Client) -> None:
        async with client.post(COMPLETIONS, json=body, headers=headers) as response:
            assert response.status == status, await response.text()
            await response.read()
            test.headers = response.headers

    return test


def test_a_request_s_spans_arrive_under_the_caller_s_trace():
    test = asking(BODY, headers=TRACEPARENT)
    spans = traced(test)
    assert spans.resource["service.name"] == "mine"
    http = spans.one(f"POST {COMPLETIONS}")
    assert (http.trace_id.hex(), http.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes(http)["http.response.status_code"] == 200
    assert test.headers["traceresponse"] == f"00-{TRACE_ID}-{http.span_id.hex()}-01"
    request = spans.one("llm_request")
    assert request.kind == http.kind == 2, "SPAN_KIND_SERVER"
    assert request.parent_span_id == http.span_id
    got = attributes(request)
    expected = {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert {name: got[name] for name in expected} == expected
    assert got["gen_ai.request.id"].startswith("cmpl-")
    children = [spans.one(name) for name in ("queue", "prefill", "decode")]
    assert {child.parent_span_id for child in children} == {request.span_id}
    assert len({span.trace_id for span in spans.spans}) == 1
    # They follow each other without a gap, and say what the attributes say.
    for before, after in itertools.pairwise(children):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    for child, name in zip(
        children,
        ("time_in_queue", "time_in_model_prefill", "time_in_model_decode"),
        strict=True,
    ):
        assert seconds(child) == pytest.approx(got[f"gen_ai.latency.{name}"], abs=1e-6)
    assert seconds(request) == pytest.approx(got["gen_ai.latency.e2e"], abs=1e-6)
    assert got["gen_ai.latency.time_to_first_token"] <= got["gen_ai.latency.e2e"]
    assert len(spans.spans) == 5


def test_samples_have_spans_of_their_own_and_prompts_share_the_trace():
    spans = traced(asking({**BODY, "prompt": ["abc", "def"], "n": 2, "max_tokens": 3}))
    requests = spans.named("llm_request")
    assert [attributes(r)["gen_ai.usage.completion_tokens"] for r in requests] == [6, 6]
    decodes = spans.named("decode")
    indices = [attributes(span)["paged.sample_index"] for span in decodes]
    assert sorted(indices) == [0, 0, 1, 1]
    assert {span.parent_span_id for span in decodes} == {r.span_id for r in requests}
    assert len({span.trace_id for span in spans.spans}) == 1


def test_neutral_parameters_are_left_out():
    spans = traced(asking({"prompt": "a", "max_tokens": 2, "temperature": 0}))
    assert "gen_ai.request.temperature" not in attributes(spans.one("llm_request"))


def test_details_are_measured_on_demand():
    spans = traced(asking(BODY), slow, details=frozenset({"host_copies", "detokenize"}))
    request = spans.one("llm_request")
    for name in ("host_copies", "detokenize"):
        span = spans.one(name)
        got = attributes(span)
        assert span.parent_span_id == request.span_id
        assert got["paged.num_steps"] == 4
        assert 0 < got["paged.busy_seconds"] <= seconds(span) + 1e-6
    # The runner samples, and sleeps, where the device's copy is waited for.
    assert attributes(spans.one("host_copies"))["paged.busy_seconds"] >= 4 * 0.004


def test_an_aborted_request_is_traced_as_far_as_it_went():
    async def test(client: Client) -> None:
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        async with client.post(COMPLETIONS, json=body) as response:
            await response.content.readany()
        while (await text(client, "/load")) != '{"server_load":0}':  # the server knows
            await asyncio.sleep(0.01)
        tap.open()
        ended = re.compile(r'^vllm:request_success_total{.*"abort".*} 1', re.M)
        while not ended.search(await text(client, "/metrics")):
            await asyncio.sleep(0.01)

    tap = Tap(2)
    spans = traced(test, tap)
    got = attributes(spans.one("llm_request"))
    assert got["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < got["gen_ai.usage.completion_tokens"] < 100
    assert spans.named("prefill")


def test_a_failure_is_an_error_of_the_span():
    spans = traced(asking(BODY, status=503), fail_at=2)
    request = spans.one("llm_request")
    assert request.status.code == 2, "STATUS_CODE_ERROR"
    assert "the device is on fire" in request.status.message
    http = spans.one(f"POST {COMPLETIONS}")
    assert (http.status.code, attributes(http)["http.response.status_code"]) == (2, 503)


def test_what_never_reached_the_engine_is_traced_as_http():
    spans = traced(asking({**BODY, "temperature": -1}, status=400))
    assert [span.name for span in spans.spans] == [f"POST {COMPLETIONS}"]
    assert spans.spans[0].status.code == 0, "the client's error is none of the server's"


def test_probes_are_not_traced():
    async def test(client: Client) -> None:
        for path in ("/health", "/metrics"):
            async with client.get(path) as response:
                assert response.status == 200

    assert traced(test).spans == []


def test_start_up_is_a_trace():
    async def test(client: Client) -> None:
        pass

    phases = (Phase("load weights", 100.0, 1.5), Phase("compile steps", 102.0, 4.0))
    spans = traced(test, phases=phases)
    root = spans.one("startup")
    assert seconds(root) == pytest.approx(6.0, abs=1e-6)
    for name, length in (("load weights", 1.5), ("compile steps", 4.0)):
        span = spans.one(name)
        assert span.parent_span_id == root.span_id
        assert seconds(span) == pytest.approx(length, abs=1e-6)


def test_a_server_without_traces_imports_no_tracing():
    code = (
        "import sys; from paged.server.app import make_app;"
        "from tests.server.fake_engine import FakeEngine; make_app(FakeEngine());"
        "print(sorted(m for m in sys.modules if m.startswith('opentelemetry')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_stream_names_its_trace_in_its_headers():
    test = asking({**BODY, "stream": True})
    traced(test)
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", test.headers["traceresponse"])


def test_traces_without_opentelemetry_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = ObservabilitySettings(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ValueError, match=r"needs the extra `otel`.*pip install 'paged\[otel\]'"):
        make_app(FakeEngine(), ServerSettings(observability=settings))


def test_spans_arrive_over_grpc_too():
    spans = traced(asking(BODY, headers=TRACEPARENT), protocol="grpc")
    assert spans.resource["service.name"] == "mine"
    assert spans.one("llm_request").trace_id.hex() == TRACE_ID


def test_traces_over_grpc_without_its_exporter_are_refused(monkeypatch):
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    settings = ObservabilitySettings(otlp_traces_endpoint="grpc://a:4317", otlp_protocol="grpc")
    message = r"grpc://a:4317 needs the extra `otel-grpc`.*pip install 'paged\[otel-grpc\]'"
    with pytest.raises(ValueError, match=message):
        make_app(FakeEngine(), ServerSettings(observability=settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"otlp_traces_endpoint": "localhost:4318"}, "must be a URL"),
        (
            {"otlp_traces_endpoint": "http://x", "detailed_traces": frozenset({"gpu"})},
            "unknown 'gpu'; known are host_copies, detokenize",
        ),
        ({"detailed_traces": frozenset({"detokenize"})}, "needs otlp_traces_endpoint"),
        ({"max_log_len": -1}, "must not be negative"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ObservabilitySettings(**settings)
