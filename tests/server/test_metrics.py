"""Metrics: names as dashboards know them, values from scripted steps; and the log line."""

import dataclasses
import re

import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import QueueFullError
from paged.scheduler.output import FinishedRequestStats, StepStats
from paged.server.app import make_app
from paged.server.log_stats import LogStats
from paged.server.metrics import EngineMetrics, length_buckets
from tests.server.fake_engine import FakeEngine
from tests.server.serving import COMPLETIONS, Client, ok, with_server

LABELS = 'engine="0",model_name="m"'
COUNTERS = [
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "admission_rejections",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_by_source",
    "prompt_tokens_cached_by_source",
    "generation_tokens",
    "request_success",
]
OWN_COUNTERS = [
    "prefix_cache_evicted_queries",
    "external_prefix_cache_hits_by_medium",
    "preemption_discarded_tokens",
]
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200 500 1000"
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_max_num_generation_tokens": LENGTHS,
    "request_prefill_kv_computed_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


def new_metrics() -> EngineMetrics:
    return EngineMetrics("m", 1024, {"block_size": "16", "num_gpu_blocks": "99"})


def finished(**fields) -> FinishedRequestStats:
    values = {
        "finish_reason": "length",
        "num_prompt_tokens": 7,
        "num_generation_tokens": 5,
        "max_tokens": 5,
        "n": 1,
        "e2e_seconds": 3.0,
        "queue_seconds": 0.5,
        "prefill_seconds": 0.25,
        "decode_seconds": 2.0,
        "inference_seconds": 2.25,
        "num_preemptions": 0,
    }
    return FinishedRequestStats(**{**values, **fields})


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """Return value by name (labels cut off where they are the common ones)."""
    result = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            result[name.replace("{" + LABELS + "}", "").removeprefix("vllm:")] = float(value)
    return result


def test_names_and_types_are_the_reference_s():
    text = new_metrics().render().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types == {
        **{f"vllm:{name}_total": "counter" for name in COUNTERS},
        **{f"paged:{name}_total": "counter" for name in OWN_COUNTERS},
        **{
            f"vllm:{name}": "gauge"
            for name in [
                *GAUGES,
                "num_requests_waiting_by_reason",
                "engine_sleep_state",
                "cache_config_info",
            ]
        },
        **{f"vllm:{name}": "histogram" for name in HISTOGRAMS},
    }
    assert "_created" not in text


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_are_the_reference_s(name):
    text = new_metrics().render().decode()
    bounds = re.findall(rf'^vllm:{name}_bucket{{.*le="([^"]+)".*}} ', text, re.MULTILINE)
    assert [float(b) for b in bounds] == [*map(float, HISTOGRAMS[name].split()), float("inf")]


@pytest.mark.parametrize(
    ("limit", "last"), [(1, 1), (4, 2), (5, 5), (8192, 5000), (100_000, 100_000)]
)
def test_length_buckets_end_at_the_context(limit, last):
    assert length_buckets(limit)[-1] == last


def test_cache_settings_are_labels():
    text = new_metrics().render().decode()
    assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="99"} 1.0' in text


def test_step_adds_to_counters_and_sets_gauges():
    metrics = new_metrics()
    step = StepStats(
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        step_tokens=(40,),
        num_prompt_tokens=30,
        num_cached_prompt_tokens=16,
        num_generation_tokens=4,
        prefix_queries=30,
        prefix_hits=16,
        num_preempted=1,
        ttft_seconds=(0.02, 0.3),
        itl_seconds=(0.01, 0.03, 0.05),
    )
    metrics.observe(step)
    metrics.observe(step)
    metrics.observe(StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0))
    got = samples(metrics)
    assert (got["num_requests_running"], got["num_requests_waiting"]) == (0, 0)
    assert got["kv_cache_usage_perc"] == 0
    assert got["prompt_tokens_total"] == 60
    assert got["prompt_tokens_cached_total"] == 32
    assert got["generation_tokens_total"] == 8
    assert (got["prefix_cache_queries_total"], got["prefix_cache_hits_total"]) == (60, 32)
    assert got["num_preemptions_total"] == 2
    assert got["time_to_first_token_seconds_count"] == 4
    assert got["time_to_first_token_seconds_sum"] == pytest.approx(0.64)
    assert got["inter_token_latency_seconds_count"] == 6
    # The empty step is no iteration.
    assert (got["iteration_tokens_total_count"], got["iteration_tokens_total_sum"]) == (2, 80)


def test_hits_below_the_device_are_counted_by_medium():
    metrics = new_metrics()
    step = StepStats(
        num_running=0,
        num_waiting=0,
        kv_cache_usage=0.0,
        prefix_queries=300,
        prefix_hits=100,
        external_prefix_queries=200,
        external_prefix_hits={"host": 48, "disk": 32},
    )
    metrics.observe(step)
    metrics.observe(step)
    got = samples(metrics)
    assert got["external_prefix_cache_queries_total"] == 400
    assert got["external_prefix_cache_hits_total"] == 160
    assert got["prefix_cache_hits_total"] == 200, "the device's own"
    by_medium = 'paged:external_prefix_cache_hits_by_medium_total{engine="0",medium="%s",%s}'
    hits = [got[by_medium % (medium, 'model_name="m"')] for medium in ("host", "disk")]
    assert hits == [96, 64]


def test_tokens_thrown_away_are_counted():
    metrics = new_metrics()
    for num_tokens in (0, 40, 2):
        metrics.observe(
            StepStats(
                num_running=0,
                num_waiting=0,
                kv_cache_usage=0.0,
                num_discarded_tokens=num_tokens,
            )
        )
    assert samples(metrics)["paged:preemption_discarded_tokens_total"] == 42


def test_waiting_requests_are_told_apart_by_reason():
    metrics = new_metrics()
    metrics.observe(StepStats(num_running=3, num_waiting=5, num_deferred=2, kv_cache_usage=0.25))
    for reason, value in (("capacity", 3), ("deferred", 2)):
        name = f'num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}}'
        assert samples(metrics)[name] == value


def test_longest_sample_is_observed_once_per_prompt():
    # Sample i stops after i + 1 tokens and <eos>.
    engine = FakeEngine(answer=lambda index: "a" * (index + 1))
    body = {"prompt": ["x", "y"], "n": 3, "temperature": 1, "max_tokens": 9}
    app = make_app(engine)

    async def test(client: Client) -> str:
        async with client.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
        async with client.get("/metrics") as response:
            return await response.text()

    text = with_server(test, app=app)
    name = "vllm:request_max_num_generation_tokens_%s{" + 'engine="0",model_name="tiny"} %s'
    assert name % ("count", "2.0") in text
    assert name % ("sum", "8.0") in text


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_finds_the_queue_full_is_counted_once(stream):
    engine = FakeEngine(refuse=QueueFullError("5 requests are waiting"))

    async def test(client: Client) -> tuple[int, str]:
        body = {"prompt": ["x", "y"], "stream": stream}
        async with client.post(COMPLETIONS, json=body) as response:
            status = response.status
        async with client.get("/metrics") as response:
            return status, await response.text()

    status, text = with_server(test, engine)
    assert status == 429
    labels = 'model_name="tiny",reason="max_num_queued_reqs"'
    assert f"vllm:admission_rejections_total{{{labels}}} 1.0" in text
    assert "vllm:request_max_num_generation_tokens_count" in text


def test_gauges_show_the_last_step():
    metrics = new_metrics()
    metrics.observe(StepStats(num_running=3, num_waiting=2, kv_cache_usage=0.25))
    got = samples(metrics)
    assert [got[name] for name in GAUGES] == [3, 2, 0.25]


def test_finished_samples_fill_the_histograms():
    metrics = new_metrics()
    ends = (finished(), finished(finish_reason="stop", num_generation_tokens=1, max_tokens=None))
    metrics.observe(StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0, finished=ends))
    got = samples(metrics)
    for name, total in {
        "e2e_request_latency_seconds": 6,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 4.5,
        "request_prompt_tokens": 14,
        "request_generation_tokens": 6,
        "request_params_n": 2,
        "request_num_preemptions": 0,
    }.items():
        assert (got[f"{name}_count"], got[f"{name}_sum"]) == (2, total), name
    # One token has no gaps, and a request without limit has no max_tokens.
    assert got["request_time_per_output_token_seconds_count"] == 1
    assert got["request_time_per_output_token_seconds_sum"] == 2.0 / 4
    assert got["request_params_max_tokens_count"] == 1
    success = 'request_success_total{engine="0",finished_reason="%s",model_name="m"}'
    counts = [got[success % reason] for reason in ("stop", "length", "abort", "error")]
    assert counts == [1, 1, 0, 0]


def test_n_is_observed_once_per_request():
    metrics = new_metrics()
    for batch in ((3, 1, 3), (3, 2), (2,)):
        ends = tuple(finished(n=n) for n in batch)
        metrics.observe(StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0, finished=ends))
    got = samples(metrics)
    assert (got["request_params_n_count"], got["request_params_n_sum"]) == (3, 3 + 2 + 1)


def test_two_engines_do_not_share_a_registry():
    first, second = new_metrics(), new_metrics()
    first.observe(StepStats(num_running=1, num_waiting=0, kv_cache_usage=0.0))
    assert samples(second)["num_requests_running"] == 0


def test_page_shows_what_the_engine_reports():
    engine = FakeEngine(config=EngineConfig())

    async def test(client: Client) -> str:
        engine.emit(StepStats(num_running=5, num_waiting=6, kv_cache_usage=0.5))
        async with client.get("/metrics") as response:
            return await response.text()

    text = with_server(test, engine)
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 6.0' in text


def test_generation_is_counted():
    engine = FakeEngine()
    app = make_app(engine)

    async def test(client: Client) -> str:
        await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "max_tokens": 3})
        async with client.get("/metrics") as response:
            return await response.text()

    text = with_server(test, app=app)
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 6.0' in text


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_log_line_has_rates_of_the_interval(caplog):
    caplog.set_level("INFO")
    clock = Clock()
    log = LogStats(clock)
    step = StepStats(
        num_running=3,
        num_waiting=1,
        kv_cache_usage=0.125,
        num_prompt_tokens=150,
        num_cached_prompt_tokens=50,
        num_generation_tokens=20,
        prefix_queries=150,
        prefix_hits=50,
    )
    log.observe(step)
    log.observe(step)
    clock.now += 10
    log.log()
    assert caplog.messages == [
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: "
        "4.0 tokens/s, Running: 3 reqs, Waiting: 1 reqs, GPU KV cache usage: 12.5%, "
        "Prefix cache hit rate: 33.3%"
    ]


def test_log_line_names_preemptions_only_when_there_are_some(caplog):
    caplog.set_level("INFO")
    log = LogStats(Clock())
    log.observe(
        StepStats(
            num_running=1,
            num_waiting=0,
            kv_cache_usage=0.0,
            num_preempted=4,
            num_discarded_tokens=900,
        )
    )
    log.log()
    log.log()
    shown = ["Preemptions: 4, Discarded: 900 tokens" in message for message in caplog.messages]
    assert shown == [True, False]


def test_log_line_names_the_tiers_only_where_there_are_some(caplog):
    caplog.set_level("INFO")
    log = LogStats(Clock())
    step = StepStats(num_running=1, num_waiting=0, kv_cache_usage=0.0)
    log.observe(step)
    log.log()
    hits = {"host": 20, "disk": 10}
    log.observe(dataclasses.replace(step, external_prefix_queries=200, external_prefix_hits=hits))
    log.log()
    assert caplog.messages[0].endswith("Prefix cache hit rate: 0.0%")
    assert caplog.messages[1].endswith(
        "Prefix cache hit rate: 0.0%, External prefix cache hit rate: 15.0%"
    )


def test_idle_interval_is_logged_at_debug_level(caplog):
    caplog.set_level("DEBUG")
    LogStats(Clock()).log()
    (record,) = caplog.records
    assert record.levelname == "DEBUG"


@pytest.mark.parametrize("log_stats", [True, False])
def test_line_is_logged_while_the_server_runs_unless_turned_off(caplog, log_stats):
    caplog.set_level("INFO")
    ok(
        COMPLETIONS,
        {"prompt": "a" * 10, "max_tokens": 20, "ignore_eos": True},
        FakeEngine(step_seconds=0.01),
        log_stats=log_stats,
        log_stats_seconds=0.02,
    )
    assert any("Avg generation throughput" in m for m in caplog.messages) == log_stats
