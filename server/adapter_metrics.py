"""`AdapterMetrics`: which LoRA adapters requests run with, and which they wait for."""

from prometheus_client import CollectorRegistry, Gauge

from paged.scheduler.output import StepStats


class AdapterMetrics:
    """The gauge of an engine that takes adapters; what it says is in its labels.

    Args:
      max_loras: places for adapters on the device.
      registry: that shows it.
    """

    def __init__(self, max_loras: int, registry: CollectorRegistry) -> None:
        self._max_loras = str(max_loras)
        self._info = Gauge(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests, as labels; the value is the time.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            registry=registry,
        )

    def show(self, stats: StepStats) -> None:
        """Show how an engine step has left the requests."""
        # One series, that of now: those that were would stay for as long as the process.
        self._info.clear()
        self._info.labels(
            max_lora=self._max_loras,
            waiting_lora_adapters=",".join(stats.waiting_loras),
            running_lora_adapters=",".join(stats.running_loras),
        ).set_to_current_time()
