"""`Fit`: what of a model lies on each of some GPUs, and how much KV cache that leaves room for."""

import dataclasses

from paged.backends import DeviceMemory
from paged.cache_groups import CacheGroup
from paged.kv_cache import KVCacheSpec
from paged.models.config import ModelConfig
from paged.models.weight_bytes import WeightBytes, count_weight_bytes
from paged.scheduler.capacity import MemoryBudget, available_kv_bytes, blocks_per_request
from paged.scheduler.config import EngineConfig, StepLimits
from paged.scheduler.errors import CapacityError
from paged.scheduler.memory import kv_cache_spec, memory_budget
from paged.scheduler.placement import split_of
from paged.scheduler.planning.workload import Workload
from paged.scheduler.resolution import cache_groups
from paged.scheduler.simulator.gpus import GPU


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A model on `config.tensor_parallel_size` GPUs, sized as the engine sizes it.

    Attributes:
      gpu: each of them.
      config: settings, resolved for this GPU.
      weights: bytes on each GPU.
      budget: memory of each GPU, and what is taken before the KV cache is.
      spec: what a block holds on each GPU.
      groups: layers with block tables of their own.
      num_blocks: KV blocks, the null block included; 0: the weights do not fit.
    """

    gpu: GPU
    config: EngineConfig
    weights: WeightBytes
    budget: MemoryBudget
    spec: KVCacheSpec
    groups: tuple[CacheGroup, ...]
    num_blocks: int

    @property
    def num_gpus(self) -> int:
        """GPUs that share the model."""
        return self.config.tensor_parallel_size

    @property
    def weights_name(self) -> str:
        """What the weights are kept in."""
        return self.config.quantization or self.config.dtype

    @property
    def kv_name(self) -> str:
        """What keys and values are kept in, as `--kv-cache-dtype` calls it."""
        name = self.config.kv_cache_dtype
        return "fp8" if name == "fp8_e4m3" else name

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache on each GPU."""
        return self.num_blocks * self.spec.bytes_per_block

    def requests(self, num_tokens: int) -> int:
        """Return how many requests of so many tokens the cache holds at once."""
        return max(0, self.num_blocks - 1) // self._blocks_of(num_tokens)

    def kv_tokens(self, num_tokens: int) -> int:
        """Return how many tokens the cache holds, in requests of `num_tokens`."""
        return max(0, self.num_blocks - 1) * num_tokens // self._blocks_of(num_tokens)

    def longest_request(self, limit: int) -> int:
        """Return the longest request that fits alone, at most `limit` tokens."""
        shortest, longest = 0, limit
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if self.requests(middle):
                shortest = middle
            else:
                longest = middle - 1
        return shortest

    def _blocks_of(self, num_tokens: int) -> int:
        windows = [group.sliding_window for group in self.groups]
        in_flight = StepLimits.of(self.config).max_num_batched_tokens
        return blocks_per_request(self.spec, num_tokens, windows, num_tokens_in_flight=in_flight)


def fit(model: ModelConfig, gpu: GPU, config: EngineConfig, workload: Workload) -> Fit:
    """Return how a model lies on GPUs.

    Args:
      model: its shape.
      gpu: each of the `config.tensor_parallel_size` GPUs, with nothing else in its memory.
      config: resolved, but for `max_model_len`.
      workload: its requests are the longest that the engine takes.

    Raises: ValueError if the model cannot be split over so many.
    """
    config = dataclasses.replace(config, max_model_len=workload.total_len)
    split = split_of(config, model)
    groups = cache_groups(config, model)
    spec = kv_cache_spec(config, split.part, groups)
    memory = DeviceMemory(gpu.memory_bytes, gpu.memory_bytes)
    budget = memory_budget(config, split, memory, is_host=False)
    try:
        available = available_kv_bytes(budget, config.gpu_memory_utilization)
    except CapacityError:
        available = 0
    return Fit(
        gpu=gpu,
        config=config,
        weights=count_weight_bytes(
            split.part, dtype=config.dtype, quantization=config.quantization
        ),
        budget=budget,
        spec=spec,
        groups=groups,
        num_blocks=spec.blocks_that_fit(available),
    )
