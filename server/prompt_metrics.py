"""`PromptTokenMetrics`: where the tokens of prompts came from, computed or out of some cache."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from paged.scheduler.output import StepStats

_MEDIA = ("host", "disk")


class PromptTokenMetrics:
    """Counters of prompt tokens; each prompt counts once, with its first token.

    A prompt that is computed again after a preemption does not count again.

    Args:
      labels: of every series.
      registry: that shows them.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*labels, *more), registry=registry)

        self._prompt = counter("prompt_tokens", "Prompt tokens, cached ones included.").labels(
            **labels
        )
        self._cached = counter(
            "prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        ).labels(**labels)
        by_source = counter(
            "prompt_tokens_by_source",
            "Prompt tokens by where they came from: computed, found on the device, or below it.",
            "source",
        )
        self._computed = by_source.labels(**labels, source="local_compute")
        self._local = by_source.labels(**labels, source="local_cache_hit")
        self._external = by_source.labels(**labels, source="external_kv_transfer")
        cached_by_source = counter(
            "prompt_tokens_cached_by_source",
            "Prompt tokens taken from the prefix cache, by where they lay.",
            "source",
        )
        self._by_medium = {
            source: cached_by_source.labels(**labels, source=source)
            for source in ("device", *_MEDIA)
        }

    def observe(self, stats: StepStats) -> None:
        """Record one engine step."""
        if not stats.num_prompt_tokens:
            return
        cached, restored = stats.num_cached_prompt_tokens, stats.restored_prompt_tokens
        num_restored = sum(restored.values())
        self._prompt.inc(stats.num_prompt_tokens)
        self._cached.inc(cached)
        self._computed.inc(stats.num_prompt_tokens - cached)
        self._local.inc(cached - num_restored)
        self._external.inc(num_restored)
        self._by_medium["device"].inc(cached - num_restored)
        for medium, num_tokens in restored.items():
            self._by_medium[medium].inc(num_tokens)
