"""Prometheus metrics with vLLM's names, fed by the `StepStats` of every engine step.

Nothing below this floor counts anything; dashboards made for vLLM work unchanged.
Source: vLLM `v1/metrics/loggers.py`.
"""

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from paged.scheduler.output import FinishedRequestStats, FinishReason, StepStats
from paged.server.adapter_metrics import AdapterMetrics
from paged.server.batch_histogram import BatchHistogram
from paged.server.prompt_metrics import PromptTokenMetrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_LABELS = ("model_name", "engine")
_ENGINE = "0"

_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SAMPLES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_FINISH_REASONS = tuple(reason.value for reason in FinishReason)
_MEDIA = ("host", "disk")


class StepMetrics(Protocol):
    """Some of the metrics."""

    def observe(self, stats: StepStats) -> None:
        """Record one engine step."""
        ...


class EngineMetrics:
    """The metrics of one engine, in a registry of their own.

    Attributes:
      registry: for what else the page is to show.
      labels: of every series.

    Args:
      model_name: label of every series.
      max_model_len: largest value that a length histogram needs a bucket for, tokens.
      cache_info: labels of `cache_config_info`.
      max_loras: places for adapters on the device; None: the engine takes none.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_info: Mapping[str, str],
        *,
        max_loras: int | None = None,
    ) -> None:
        # A switch of the whole library: `x_created` series double the page and nobody plots them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        # Gauges are set from it when the page is asked for, not with every step.
        self._last = StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0)
        self.labels = {"model_name": model_name, "engine": _ENGINE}
        self._parts: list[StepMetrics] = [PromptTokenMetrics(self.labels, self.registry)]
        self._define_step_metrics()
        self._define_request_metrics(length_buckets(max_model_len))
        success = Counter(
            "vllm:request_success",
            "Finished samples by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {
            reason: success.labels(model_name, _ENGINE, reason) for reason in _FINISH_REASONS
        }
        # A record arrives per sample, `request_params_n` counts requests: one per n records.
        self._samples_of_n: Tally[int] = Tally()
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many were waiting.",
            ("model_name", "reason"),
            registry=self.registry,
        ).labels(model_name, "max_num_queued_reqs")
        sleep = Gauge(
            "vllm:engine_sleep_state",
            "1 at the state the engine is in; it never sleeps.",
            (*_LABELS, "sleep_state"),
            registry=self.registry,
        )
        for state in ("awake", "weights_offloaded", "discard_all"):
            sleep.labels(model_name, _ENGINE, state).set(state == "awake")
        info = Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache, as labels.",
            (*cache_info, "engine"),
            registry=self.registry,
        )
        info.labels(**cache_info, engine=_ENGINE).set(1)
        self._adapters = None if max_loras is None else AdapterMetrics(max_loras, self.registry)

    def add(self, part: StepMetrics) -> None:
        """Let further metrics, in the same registry, hear of every step."""
        self._parts.append(part)

    def observe(self, stats: StepStats) -> None:
        """Record one engine step."""
        self._last = stats
        self._generation_tokens.inc(stats.num_generation_tokens)
        for num_tokens in stats.step_tokens:
            self._step_tokens.observe(num_tokens)
        self._itl.observe_all(stats.itl_seconds)
        # Each of the others takes a lock: most steps admit, preempt and finish nobody.
        if stats.prefix_queries:
            self._count_lookups(stats)
        if stats.num_preempted or stats.num_discarded_tokens:
            self._discarded_tokens.inc(stats.num_discarded_tokens)
            self._preemptions.inc(stats.num_preempted)
        for part in self._parts:
            part.observe(stats)
        for seconds in stats.ttft_seconds:
            self._ttft.observe(seconds)
        for finished in stats.finished:
            self._observe_finished(finished)

    def observe_longest_sample(self, num_tokens: int) -> None:
        """Record how many tokens the longest sample of a finished request has."""
        self._max_generation_tokens.observe(num_tokens)

    def count_rejection(self) -> None:
        """Record that the queue was too full for a request."""
        self._rejections.inc()

    def totals(self, *names: str) -> list[float]:
        """Return the values of counters of ours, by name without prefix and `_total`."""
        wanted = [f"vllm:{name}_total" for name in names]
        families = self.registry.restricted_registry(wanted).collect()
        found = {sample.name: sample.value for family in families for sample in family.samples}
        return [found[name] for name in wanted]

    def render(self) -> bytes:
        """Return the page in Prometheus' text format, version 0.0.4."""
        last = self._last
        self._running.set(last.num_running)
        self._waiting.set(last.num_waiting)
        self._waiting_for_capacity.set(last.num_waiting - last.num_deferred)
        self._deferred.set(last.num_deferred)
        self._kv_cache_usage.set(last.kv_cache_usage)
        if self._adapters is not None:
            self._adapters.show(last)
        return generate_latest(self.registry)

    def _count_lookups(self, stats: StepStats) -> None:
        self._prefix_queries.inc(stats.prefix_queries)
        self._prefix_hits.inc(stats.prefix_hits)
        self._prefix_evicted.inc(stats.prefix_evicted)
        self._external_queries.inc(stats.external_prefix_queries)
        for medium, num_tokens in stats.external_prefix_hits.items():
            self._external_hits.inc(num_tokens)
            self._external_hits_by_medium[medium].inc(num_tokens)

    def _observe_finished(self, sample: FinishedRequestStats) -> None:
        self._success[sample.finish_reason].inc()
        self._e2e.observe(sample.e2e_seconds)
        self._queue.observe(sample.queue_seconds)
        self._prefill.observe(sample.prefill_seconds)
        self._decode.observe(sample.decode_seconds)
        self._inference.observe(sample.inference_seconds)
        self._request_prompt_tokens.observe(sample.num_prompt_tokens)
        self._request_generation_tokens.observe(sample.num_generation_tokens)
        self._request_computed_tokens.observe(sample.num_prompt_tokens - sample.num_cached_tokens)
        self._request_preemptions.observe(sample.num_preemptions)
        if sample.num_generation_tokens > 1:
            gaps = sample.num_generation_tokens - 1
            self._time_per_token.observe(sample.decode_seconds / gaps)
        if sample.max_tokens is not None:
            self._params_max_tokens.observe(sample.max_tokens)
        self._samples_of_n[sample.n] += 1
        if self._samples_of_n[sample.n] == sample.n:
            del self._samples_of_n[sample.n]
            self._params_n.observe(sample.n)

    def _define_step_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be run.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait to be run; capacity: for a place in the batch or for blocks; "
            "deferred: for a prefix on its way from host memory or disk, or for a place for the "
            "adapter.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
        self._waiting_for_capacity, self._deferred = (
            by_reason.labels(self._model_name, _ENGINE, reason)
            for reason in ("capacity", "deferred")
        )
        self._kv_cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1."
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._prefix_evicted = self._counter(
            "prefix_cache_evicted_queries",
            "Prompt tokens not found that had been cached and were evicted not long before.",
            prefix="paged",
        )
        self._external_queries = self._counter(
            "external_prefix_cache_queries",
            "Prompt tokens not found on the device and looked up in host memory and on disk.",
        )
        self._external_hits = self._counter(
            "external_prefix_cache_hits", "Prompt tokens found in host memory or on disk."
        )
        by_medium = Counter(
            "paged:external_prefix_cache_hits_by_medium",
            "Prompt tokens found in host memory or on disk, by where they lay.",
            (*_LABELS, "medium"),
            registry=self.registry,
        )
        self._external_hits_by_medium = {
            medium: by_medium.labels(self._model_name, _ENGINE, medium) for medium in _MEDIA
        }
        self._discarded_tokens = self._counter(
            "preemption_discarded_tokens",
            "Computed tokens thrown away by preemptions.",
            prefix="paged",
        )
        self._preemptions = self._counter("num_preemptions", "Preemptions of running requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed per engine step.", _STEP_TOKENS
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _TTFT_SECONDS
        )
        self._itl = BatchHistogram(
            "vllm:inter_token_latency_seconds",
            "Gap between two tokens of a request.",
            dict(zip(_LABELS, (self._model_name, _ENGINE), strict=True)),
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )

    def _define_request_metrics(self, lengths: Sequence[int]) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return self._histogram(name, text, _REQUEST_SECONDS)

        self._e2e = seconds("e2e_request_latency_seconds", "Arrival to end.")
        self._queue = seconds("request_queue_time_seconds", "Queued to first scheduled.")
        self._prefill = seconds("request_prefill_time_seconds", "First scheduled to first token.")
        self._decode = seconds("request_decode_time_seconds", "First token to last token.")
        self._inference = seconds(
            "request_inference_time_seconds", "First scheduled to last token."
        )
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean gap between the tokens of a request.",
            _TOKEN_SECONDS,
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", lengths
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", lengths
        )
        self._request_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request that were computed, cached ones left out.",
            lengths,
        )
        self._max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest sample per request.",
            lengths,
        )
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens a request may generate.", lengths
        )
        self._params_n = self._histogram("request_params_n", "Samples per request.", _SAMPLES)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions per request.", _PREEMPTIONS
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry)
        return gauge.labels(self._model_name, _ENGINE)

    def _counter(self, name: str, text: str, *, prefix: str = "vllm") -> Counter:
        counter = Counter(f"{prefix}:{name}", text, _LABELS, registry=self.registry)
        return counter.labels(self._model_name, _ENGINE)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model_name, _ENGINE)


def length_buckets(max_value: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    buckets: list[int] = []
    decade = 1
    while decade <= max_value:
        buckets += [step * decade for step in (1, 2, 5) if step * decade <= max_value]
        decade *= 10
    return buckets
