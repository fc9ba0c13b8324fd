"""`Speed`: predicted times of prefill and decode of a model that fits, by the roofline."""

from collections.abc import Callable
from dataclasses import dataclass, field

from paged.models.config import ModelConfig
from paged.scheduler.config import StepLimits
from paged.scheduler.planning.fit import Fit
from paged.scheduler.planning.workload import Workload, decode_load, prefill_loads
from paged.scheduler.simulator.roofline import Roofline

# No batch is larger; where a limit is not reached by then it never matters.
_LARGEST_BATCH = 2**20


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What the roofline assumes beside data sheets; fields as in `Roofline`."""

    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    step_overhead_seconds: float = 0.0005


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt that has the engine for itself: tokens computed, and seconds until its answer."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Decode:
    """One step of so many requests, each of which gets a token.

    Attributes:
      batch: requests.
      seconds: of the step, which is the time between two tokens.
      bound: what it waits for most: "weights" or "KV cache", which are read, or "arithmetic".
    """

    batch: int
    seconds: float
    bound: str

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests per second."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class Knee:
    """The batch size from which more requests at once gain little.

    Attributes:
      batch: the smaller of the two below.
      arithmetic: from here on arithmetic is the limit: tokens per second stay as they are. None:
        reading is the limit at any size.
      kv_cache: from here on a step reads more KV cache than weights: twice the requests gain less
        than half again as many tokens per second. None: at no size.
    """

    batch: int
    arithmetic: int | None
    kv_cache: int | None

    @property
    def reason(self) -> str:
        """What the knee comes from: "arithmetic" or "KV cache"."""
        return "arithmetic" if self.batch == self.arithmetic else "KV cache"


@dataclass(frozen=True)
class Speed:
    """What to expect of a model that fits, for a workload; a roofline, not a measurement."""

    model: ModelConfig
    fit: Fit
    workload: Workload
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    @property
    def roofline(self) -> Roofline:
        """The formula."""
        assumed = self.efficiencies
        return Roofline(
            self.fit.gpu,
            self.model,
            tensor_parallel_size=self.fit.num_gpus,
            kv_cache_dtype="fp8" if self.fit.kv_name.startswith("fp8") else "bfloat16",
            compute_efficiency=assumed.compute_efficiency,
            memory_efficiency=assumed.memory_efficiency,
            step_overhead_seconds=assumed.step_overhead_seconds,
            weights=self.fit.weights,
        )

    @property
    def largest_batch(self) -> int:
        """Requests that run at once: what memory holds, and no more than the engine's limit."""
        limit = StepLimits.of(self.fit.config).max_num_seqs
        return min(self.fit.requests(self.workload.total_len), limit)

    @property
    def cached_len(self) -> int:
        """Tokens of each prompt that the prefix cache has: whole blocks of the shared prefix."""
        shared, block_size = self.workload.shared_prefix_len, self.fit.config.block_size
        return shared // block_size * block_size

    def prefill(self, num_tokens: int | None = None) -> Prefill:
        """Return the time of a prompt; None: the workload's, behind what is cached of it."""
        start = self.cached_len if num_tokens is None else 0
        end = num_tokens or self.workload.input_len
        budget = StepLimits.of(self.fit.config).max_num_batched_tokens
        loads = prefill_loads(self.model, end, start=start, budget=budget)
        return Prefill(end - start, sum(map(self.roofline.step_seconds, loads)))

    def decode(self, batch: int) -> Decode:
        """Return a step of `batch` requests half-way through their answers."""
        roofline = self.roofline
        load = decode_load(self.model, batch, self.workload.mean_context)
        work = roofline.step_work(load)
        reading = roofline.memory_seconds(work.weight_bytes + work.kv_bytes)
        larger = "weights" if work.weight_bytes >= work.kv_bytes else "KV cache"
        bound = "arithmetic" if roofline.compute_seconds(work) > reading else larger
        return Decode(batch, roofline.step_seconds(load), bound)

    def output_tokens_per_second(self, batch: int) -> float:
        """Return tokens generated per second when `batch` requests are always running.

        Each request takes its prefill, in which no other gets a token, and its share of as many
        steps as it has tokens.
        """
        length = self.workload.output_len
        decodes = (length - 1) * self.decode(batch).seconds / batch
        return length / (self.prefill().seconds + decodes)

    def knee(self) -> Knee:
        """Return the batch size from which more requests at once gain little."""
        roofline = self.roofline

        def arithmetic_limits(batch: int) -> bool:
            work = roofline.step_work(decode_load(self.model, batch, self.workload.mean_context))
            reading = roofline.memory_seconds(work.weight_bytes + work.kv_bytes)
            return roofline.compute_seconds(work) >= reading

        def cache_outweighs(batch: int) -> bool:
            work = roofline.step_work(decode_load(self.model, batch, self.workload.mean_context))
            return work.kv_bytes >= work.weight_bytes

        arithmetic, kv_cache = _first(arithmetic_limits), _first(cache_outweighs)
        found = min(filter(None, (arithmetic, kv_cache)), default=_LARGEST_BATCH)
        return Knee(found, arithmetic, kv_cache)


def _first(holds: Callable[[int], bool]) -> int | None:
    """Return the smallest batch from which on a condition holds, None if there is none."""
    if not holds(_LARGEST_BATCH):
        return None
    low, high = 0, _LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
