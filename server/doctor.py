"""`diagnose`: which resource holds a server's requests back, from two readings of its metrics.

The names are vLLM's, so vLLM's servers can be asked as well; what they do not count is left out of
the evidence.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# A cache that is fuller has no room for another request of usual length.
_FULL = 0.9
# Hit rates below it are called low, of at least so many tokens looked up.
_LOW_HIT_RATE = 0.2
_LEAST_TOKENS = 256
# Evicted content that was asked for again: this share of what was looked up makes it the cause.
_EVICTED_SHARE = 0.1
# Steps this full, of the budget, are taken for full: the last chunk of a prompt seldom fits.
_FULL_STEP = 0.7


@dataclass(frozen=True, slots=True)
class Reading:
    """What `/metrics` said at one moment.

    Attributes:
      values: by metric name without "vllm:" and "paged:", summed over engines and other labels.
      config: labels of `cache_config_info`.
    """

    values: Mapping[str, float]
    config: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> float:
        """Return a metric's value, 0 if the server has none of that name."""
        return self.values.get(name, 0.0)

    def setting(self, name: str) -> int | None:
        """Return a setting of the server that is a number; None if it does not say it."""
        text = self.config.get(name, "")
        return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the readings show.

    Attributes:
      name: "kv_memory", "batch_size", "token_budget", "working_set", "different_prompts",
        "rejections", "idle" or "healthy".
      summary: what it is, a sentence.
      evidence: the figures, a sentence each.
      advice: what to do, a sentence each; flags are those of `paged serve`.
    """

    name: str
    summary: str
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON types."""
        return dataclasses.asdict(self)


def parse_metrics(text: str) -> Reading:
    """Return the reading that a page in Prometheus' text format holds.

    Raises: ValueError if it is no such page, or of no server with vLLM's metric names.
    """
    values: dict[str, float] = {}
    config: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("vllm:").removeprefix("paged:")
        if name == family.name:
            continue
        for sample in family.samples:
            if name == "cache_config_info":
                config = dict(sample.labels)
            elif family.type == "gauge" or sample.name.endswith(("_sum", "_count", "_total")):
                key = sample.name.partition(":")[2].removesuffix("_total")
                values[key] = values.get(key, 0.0) + sample.value
    if "num_requests_running" not in values:
        raise ValueError("it has no vllm:num_requests_running")
    return Reading(values, config)


def diagnose(
    first: Reading, second: Reading, seconds: float, between: Sequence[Reading] = ()
) -> list[Finding]:
    """Return what two readings of one server show, the most pressing first.

    Args:
      first, second: the readings.
      seconds: between them.
      between: more of them, for what comes and goes: a batch whose requests have just ended is not
        full at that moment.
    """
    change = _Change(first, second, seconds, tuple(between))
    findings = [
        finding
        for check in (_kv_memory, _batch_limits, _rejections, _prefix_cache)
        if (finding := check(change)) is not None
    ]
    return findings or [_nothing_found(change)]


@dataclass(frozen=True, slots=True)
class _Change:
    """Two readings; `first` and `second` are for gauges, `rise` is for counters."""

    first: Reading
    second: Reading
    seconds: float
    between: tuple[Reading, ...] = ()

    def rise(self, name: str) -> float:
        # A server that was started anew counts from 0.
        rise = self.second.get(name) - self.first.get(name)
        return rise if rise >= 0 else self.second.get(name)

    def both(self, name: str) -> tuple[float, float]:
        return self.first.get(name), self.second.get(name)

    def most(self, name: str) -> float:
        return max(reading.get(name) for reading in (self.first, *self.between, self.second))

    def mean(self, histogram: str) -> float | None:
        count = self.rise(f"{histogram}_count")
        return self.rise(f"{histogram}_sum") / count if count else None

    @property
    def has_queue(self) -> bool:
        """Whether requests waited for room at both moments."""
        return all(self._waits(reading) for reading in (self.first, self.second))

    @property
    def lacks_blocks(self) -> bool:
        """Whether somebody wanted a block that was not there."""
        # A preemption is that, however much it has freed by the time of a reading.
        is_full = max(self.both("kv_cache_usage_perc")) >= _FULL
        return self.rise("num_preemptions") > 0 or (is_full and self.has_queue)

    def queue(self) -> str:
        before, after = self.both("num_requests_waiting")
        running = self.second.get("num_requests_running")
        text = f"{before:.0f} requests waited at first and {after:.0f} after {self.seconds:.3g} s"
        waited = self.mean("request_queue_time_seconds")
        tail = "" if waited is None else f"; those that ended had waited {waited:.3g} s on average"
        return f"{text}, while {running:.0f} ran{tail}."

    def usage(self) -> str:
        before, after = self.both("kv_cache_usage_perc")
        blocks = self.second.setting("num_gpu_blocks")
        of = "" if blocks is None else f" of {blocks:,} blocks"
        return f"The KV cache was {before:.0%} and then {after:.0%} full{of}."

    @staticmethod
    def _waits(reading: Reading) -> bool:
        return reading.get("num_requests_waiting") > 0


def _kv_memory(change: _Change) -> Finding | None:
    preempted = change.rise("num_preemptions")
    if not change.lacks_blocks:
        return None
    evidence = [change.usage()]
    if change.has_queue:
        evidence.append(change.queue())
    advice = [
        "Give the cache more memory (--gpu-memory-utilization, or --kv-cache-memory-bytes), or "
        "spread the model over more devices (--tensor-parallel-size).",
        "Halve its bytes per token: --kv-cache-dtype fp8.",
    ]
    if preempted:
        discarded = change.rise("preemption_discarded_tokens")
        lost = f" and threw {discarded:,.0f} computed tokens away" if discarded else ""
        evidence.append(f"{preempted:.0f} preemptions took blocks from running requests{lost}.")
        seqs = change.second.setting("max_num_seqs")
        advice.append(
            f"Lower --max-num-seqs{_now(seqs)} until preemptions stop: work is no longer done "
            "twice, at the price of a longer queue."
        )
    return Finding(
        "kv_memory",
        "KV memory is the bottleneck: requests wait for blocks, not for computation.",
        tuple(evidence),
        tuple(advice),
    )


def _batch_limits(change: _Change) -> Finding | None:
    if not change.has_queue or change.lacks_blocks:
        return None
    evidence = (change.queue(), change.usage())
    seqs, budget = (change.second.setting(f"max_num_{name}") for name in ("seqs", "batched_tokens"))
    if seqs is not None and change.most("num_requests_running") >= seqs:
        return Finding(
            "batch_size",
            "The limit on concurrent requests is the bottleneck: there is KV memory left.",
            evidence,
            (f"Raise --max-num-seqs{_now(seqs)} and watch the time between tokens grow.",),
        )
    tokens = change.mean("iteration_tokens_total")
    if budget is not None and tokens is not None and tokens >= _FULL_STEP * budget:
        return Finding(
            "token_budget",
            "The token budget of a step is the bottleneck: prompts queue for it.",
            (*evidence, f"A step computed {tokens:.0f} tokens on average of {budget}."),
            (
                f"Raise --max-num-batched-tokens{_now(budget)}: prompts finish sooner, and steps "
                "that hold them take longer for everybody else.",
            ),
        )
    return Finding(
        "batch_size",
        "Requests queue although there is KV memory left: a limit of the batch holds them back.",
        evidence,
        # How many run is counted when a step is over, and some have just ended.
        (
            f"Raise --max-num-seqs{_now(seqs)}; if many prompts are long, "
            f"--max-num-batched-tokens{_now(budget)}.",
        ),
    )


def _now(setting: int | None) -> str:
    return "" if setting is None else f" (now {setting})"


def _rejections(change: _Change) -> Finding | None:
    rejected = change.rise("admission_rejections")
    if not rejected:
        return None
    return Finding(
        "rejections",
        f"{rejected:.0f} requests were answered with 429: the queue was full.",
        (change.queue(),),
        ("Add servers, or raise --max-num-queued-reqs if clients would rather wait.",),
    )


def _prefix_cache(change: _Change) -> Finding | None:
    queries, hits = change.rise("prefix_cache_queries"), change.rise("prefix_cache_hits")
    hits += change.rise("external_prefix_cache_hits")
    if queries < _LEAST_TOKENS or hits >= _LOW_HIT_RATE * queries:
        return None
    found = f"Of {queries:,.0f} prompt tokens, {hits:,.0f} ({hits / queries:.0%}) were cached."
    evicted = change.rise("prefix_cache_evicted_queries")
    if evicted >= _EVICTED_SHARE * queries:
        return Finding(
            "working_set",
            "Prompts repeat, but what they share is evicted before it is asked for again: the "
            "working set exceeds the cache.",
            (found, f"{evicted:,.0f} of the others had been cached and were evicted.",
             change.usage()),
            (
                "Give the cache more memory, or memory below it: --kv-offloading-size GIB.",
                "If the same documents come round and round, keep some of them instead of none: "
                "--prefix-cache-policy lip or arc (`paged simulate` compares them).",
            ),
        )  # fmt: skip
    return Finding(
        "different_prompts",
        "Hardly any prompt begins like an earlier one. If yours share a prefix, something early "
        "in it differs: whole blocks are shared up to the first token that is not the same.",
        (found, "Hardly anything of the rest was ever in the cache."),
        (
            "Look for a date, an id or a name near the start: `paged doctor URL --compare A B` "
            "shows the first token in which two prompts differ.",
            "Put what changes at the end, and send the same cache_salt and key.",
        ),
    )


def _nothing_found(change: _Change) -> Finding:
    evidence = (change.queue(), change.usage())
    tokens = change.rise("generation_tokens")
    if not tokens and not any(change.both("num_requests_running")):
        return Finding(
            "idle",
            "Nothing ran between the two readings, so there is nothing to be seen.",
            evidence,
            ("Ask again while there is load; --seconds sets the time between the readings.",),
        )
    rate = f"{tokens / change.seconds:,.0f} tokens were generated per second."
    return Finding(
        "healthy",
        "Nothing holds requests back: none waits for memory or for a place in the batch.",
        (*evidence, rate),
    )
