"""Microseconds that metrics and traces cost, per step and per token, beside the step itself.

    python -m benchmarks.metrics_cost

The engine loop of `benchmarks/host_loop.py`, a runner that returns at once, all requests streaming:
so the share is that of the host's own step, of which a device's step is many times as long.

collect      `StatsBuilder`: the figures of a step, on the engine's thread
observe      what listens to them on the event loop: `EngineMetrics`, `LogStats`, `RequestWatch`
per token    both, by the step's tokens
of the step  both, by the step's processor time on the host
2% of ms     how long a step has to take, with its device, for both to be 2 % of it
finish       `EngineMetrics` for a request that has ended, once per request
trace        the spans of such a request, without their export, once per traced request
http         `HttpMetrics`, once per HTTP request

All are processor times, medians over the steps of one run; the last three, means of a thousand.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from benchmarks.host_loop import Load, Stopwatch, spare_collector
from paged.scheduler.output import FinishedRequestStats, Moments, StepStats
from paged.scheduler.params import SamplingParams
from paged.scheduler.stats import StatsBuilder
from paged.server.http_metrics import HttpMetrics
from paged.server.log_stats import LogStats
from paged.server.metrics import EngineMetrics
from paged.server.request_watch import RequestWatch
from paged.server.tracing import Tracing

NUM_CALLS = 1000


def cost_of_steps(num_seqs: int, num_steps: int) -> dict[str, float]:
    """Return microseconds by column for steps of so many decodes."""
    load = Load(num_seqs, num_steps, stream=True)
    load.fill()
    listeners = [
        EngineMetrics("m", load.max_model_len, {}).observe,
        LogStats().observe,
        RequestWatch().observe,
    ]
    watch = Stopwatch()
    watch.wrap(StatsBuilder, "on_step", "collect")
    watch.wrap(StatsBuilder, "take", "collect")
    collected, observed, steps = [], [], []
    try:
        for _ in range(num_steps):
            watch.seconds.clear()
            started = time.thread_time()
            _, stats = load.engine.step_deltas()
            stepped = time.thread_time()
            for listener in listeners:
                listener(stats)
            observed.append(time.thread_time() - stepped)
            steps.append(stepped - started)
            collected.append(watch.seconds["collect"])
    finally:
        watch.unwrap()
    collect, observe, step = (1e6 * statistics.median(s) for s in (collected, observed, steps))
    both = collect + observe
    return {
        "collect": collect,
        "observe": observe,
        "per token": both / num_seqs,
        "host step": step,
        "2% of ms": both / 0.02 / 1000,
        "of the step": both / step,
    }


def ended() -> FinishedRequestStats:
    return FinishedRequestStats(
        finish_reason="length",
        num_prompt_tokens=100,
        num_generation_tokens=100,
        max_tokens=100,
        n=1,
        e2e_seconds=1.0,
        queue_seconds=0.1,
        prefill_seconds=0.1,
        decode_seconds=0.8,
        inference_seconds=0.9,
        num_preemptions=0,
        moments=Moments(1.0, 1.0, 1.1, 1.2, 2.0, 2.0),
    )


def mean_microseconds(function: Callable[[], object]) -> float:
    started = time.thread_time()
    for _ in range(NUM_CALLS):
        function()
    return 1e6 * (time.thread_time() - started) / NUM_CALLS


def cost_of_requests() -> dict[str, float]:
    """Return microseconds per request of what happens at its end."""
    metrics = EngineMetrics("m", 8192, {})
    empty = StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0)
    one = StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0, finished=(ended(),))
    finish = mean_microseconds(lambda: metrics.observe(one))
    finish -= mean_microseconds(lambda: metrics.observe(empty))
    tracing = Tracing(TracerProvider(shutdown_on_exit=False), "m")
    params = SamplingParams(max_tokens=100)
    trace = mean_microseconds(lambda: tracing.start_request("r", params, "m").end([ended()], None))
    return {"finish": finish, "trace": trace, "http": cost_of_http()}


def cost_of_http() -> float:
    middleware = HttpMetrics(CollectorRegistry()).middleware()

    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def run() -> float:
        app = web.Application()
        request = make_mocked_request("POST", "/v1/completions", app=app)
        route = app.router.add_post("/v1/completions", handler)
        match = await app.router.resolve(request)
        request._match_info = match
        assert route.resource is not None
        started = time.thread_time()
        for _ in range(NUM_CALLS):
            await middleware(request, handler)
        counted = time.thread_time()
        for _ in range(NUM_CALLS):
            await handler(request)
        return 1e6 * (2 * counted - started - time.thread_time()) / NUM_CALLS

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--json", help="write the figures to this file, in microseconds")
    args = parser.parse_args()
    spare_collector()
    rows = {str(n): cost_of_steps(n, args.num_steps) for n in args.num_seqs}
    requests = cost_of_requests()
    print(f"{'streams':<10}" + "".join(f"{name:>12}" for name in next(iter(rows.values()))))
    for name, row in rows.items():
        *times, share = row.values()
        print(f"{name:<10}" + "".join(f"{value:>12.2f}" for value in times) + f"{share:>12.1%}")
    for name, value in requests.items():
        print(f"{name}: {value:.1f} us")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"steps": rows, "requests": requests}, file, indent=2)


if __name__ == "__main__":
    main()
