"""The line about throughput and load that the server logs every few seconds."""

import asyncio
import logging
import time
from collections.abc import Callable

from paged.scheduler.output import StepStats

logger = logging.getLogger(__name__)


class LogStats:
    """Sums up the steps between two lines.

    Args:
      clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = StepStats(num_running=0, num_waiting=0, kv_cache_usage=0.0)
        self._total_queries = 0
        self._total_hits = 0
        self._total_external_queries = 0
        self._total_external_hits = 0
        self._start_interval()

    def observe(self, stats: StepStats) -> None:
        """Record one engine step."""
        self._last = stats
        self._num_computed += stats.num_prompt_tokens - stats.num_cached_prompt_tokens
        self._num_generated += stats.num_generation_tokens
        self._num_preempted += stats.num_preempted
        self._total_queries += stats.prefix_queries
        self._total_hits += stats.prefix_hits
        self._total_external_queries += stats.external_prefix_queries
        self._total_external_hits += sum(stats.external_prefix_hits.values())
        self._num_discarded += stats.num_discarded_tokens

    def log(self) -> None:
        """Log the interval since the last call; at debug level if nothing happened in it."""
        seconds = max(self._clock() - self._started, 1e-9)
        last = self._last
        idle = not (self._num_computed or self._num_generated or last.num_running)
        preemptions = external = ""
        if self._num_preempted:
            preemptions = (
                f", Preemptions: {self._num_preempted}, Discarded: {self._num_discarded} tokens"
            )
        if self._total_external_queries:
            rate = 100 * self._total_external_hits / self._total_external_queries
            external = f", External prefix cache hit rate: {rate:.1f}%"
        hit_rate = self._total_hits / self._total_queries if self._total_queries else 0.0
        logger.log(
            logging.DEBUG if idle else logging.INFO,
            "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: "
            "%.1f tokens/s, Running: %d reqs, Waiting: %d reqs%s, GPU KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%%s",
            self._num_computed / seconds,
            self._num_generated / seconds,
            last.num_running,
            last.num_waiting,
            preemptions,
            100 * last.kv_cache_usage,
            100 * hit_rate,
            external,
        )
        self._start_interval()

    async def log_forever(self, interval_seconds: float) -> None:
        """Log a line every `interval_seconds` until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            self.log()

    def _start_interval(self) -> None:
        self._started = self._clock()
        # Prompt tokens from the cache cost nothing, so they are not throughput.
        self._num_computed = 0
        self._num_generated = 0
        self._num_preempted = 0
        self._num_discarded = 0
