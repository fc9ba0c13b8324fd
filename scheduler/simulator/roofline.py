"""`Roofline`: how long a step takes on a GPU, and how many KV blocks fit beside the weights."""

from dataclasses import dataclass, field

from paged.kv_cache import KVCacheSpec
from paged.models.config import ModelConfig
from paged.scheduler.capacity import MemoryBudget, available_kv_bytes
from paged.scheduler.simulator.gpus import GPU
from paged.scheduler.simulator.model_presets import ModelSize, model_size
from paged.scheduler.simulator.step_cost import StepLoad

# Storage types by the names of the command line: bytes per element and NumPy name.
_BYTES = {"bfloat16": 2, "fp8": 1}
_NUMPY_NAMES = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}

_ACTIVATION_BYTES = 2  # activations are bfloat16
_LOGIT_BYTES = 4  # and logits float32


@dataclass(frozen=True)
class Roofline:
    """The time of a step from data-sheet figures; a `StepCost`.

    With T new tokens, S sampled rows, P attended pairs and C context tokens in the step, L layers,
    N q heads, K kv heads, head dim H, model width D, and tensor parallelism over R GPUs:

        flops   = 2 T layer_matmul + 2 S head + 4 L N H P
        bytes   = (layer_matmul + head if S) weight_bytes
                + (C + T) 2 L K H kv_bytes
        compute = flops / R / (compute_efficiency * peak)
        memory  = bytes / R / (memory_efficiency * bandwidth)
        reduce  = 2 L * 2 (R - 1) / R * T D * 2 bytes / link
        seconds = step_overhead_seconds + max(compute, memory) + reduce

    4 L N H P counts the products of queries with keys and of weights with values, causally: the
    first n tokens of a prompt are n (n + 1) / 2 pairs. Weights are read once per step, keys and
    values once per row. If R exceeds K, kv heads are repeated and each GPU reads 1 / K of the
    cache. Left out: activations in memory, the quantization of activations, uneven rows, and what
    kernels lose, which the two efficiencies stand for.

    Attributes:
      gpu, model: what runs what.
      tensor_parallel_size: GPUs that share every layer.
      weight_dtype, kv_cache_dtype: "bfloat16" or "fp8"; products are 8-bit if the weights are.
      compute_efficiency, memory_efficiency: share of the data sheet's figures that a whole step
        reaches; assumptions. A large matrix product alone reaches 0.8 of an H200's peak and a copy
        0.9 of its bandwidth; steps are made of smaller things.
      step_overhead_seconds: host time per step that nothing hides; an assumption.

    Raises: ValueError for an unknown type or a number out of range.
    """

    gpu: GPU
    model: ModelConfig
    tensor_parallel_size: int = 1
    weight_dtype: str = "bfloat16"
    kv_cache_dtype: str = "bfloat16"
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    step_overhead_seconds: float = 0.0005
    _size: ModelSize = field(init=False, repr=False)
    _kv_token_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("weight_dtype", "kv_cache_dtype"):
            if getattr(self, name) not in _BYTES:
                raise ValueError(f"{name}={getattr(self, name)!r} must be bfloat16 or fp8.")
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in (0, 1].")
        heads, parallel = self.model.num_q_heads, self.tensor_parallel_size
        if parallel < 1 or heads % parallel:
            raise ValueError(
                f"tensor_parallel_size={parallel} must divide the {heads} q heads of the model."
            )
        # Cached: one step in a million must not count the parameters again.
        object.__setattr__(self, "_size", model_size(self.model))
        object.__setattr__(self, "_kv_token_bytes", self.kv_spec(1).bytes_per_token)

    @property
    def name(self) -> str:
        """GPU and how many."""
        parallel = self.tensor_parallel_size
        return self.gpu.name if parallel == 1 else f"{parallel} x {self.gpu.name}"

    def step_seconds(self, load: StepLoad) -> float:
        """Return the time of a step, in seconds."""
        size, model, gpu, parallel = self._size, self.model, self.gpu, self.tensor_parallel_size
        flops = 2 * load.num_tokens * size.layer_matmul + 2 * load.num_samples * size.head
        flops += 4 * model.num_layers * model.num_q_heads * model.head_dim * load.attended_pairs
        weights = size.layer_matmul + (size.head if load.num_samples else 0)
        weight_bytes = weights * _BYTES[self.weight_dtype] / parallel
        # `_kv_token_bytes` is one GPU's share already.
        kv_bytes = (load.context_tokens + load.num_tokens) * self._kv_token_bytes
        peak = gpu.fp8_flops if self.weight_dtype == "fp8" else gpu.bf16_flops
        compute = flops / parallel / (self.compute_efficiency * peak)
        memory = (weight_bytes + kv_bytes) / (self.memory_efficiency * gpu.bytes_per_second)
        reduced = 2 * model.num_layers * load.num_tokens * model.hidden_size * _ACTIVATION_BYTES
        reduce = 2 * (parallel - 1) / parallel * reduced / gpu.link_bytes_per_second
        return self.step_overhead_seconds + max(compute, memory) + reduce

    def kv_spec(self, block_size: int) -> KVCacheSpec:
        """Return what a block holds on one GPU."""
        return KVCacheSpec(
            num_layers=self.model.num_layers,
            num_kv_heads=max(1, self.model.num_kv_heads // self.tensor_parallel_size),
            head_dim=self.model.head_dim,
            block_size=block_size,
            dtype=_NUMPY_NAMES[self.kv_cache_dtype],
        )

    def num_blocks(
        self,
        block_size: int = 16,
        *,
        gpu_memory_utilization: float = 0.92,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
    ) -> int:
        """Return how many KV blocks fit beside weights and activations, the null block included.

        Activations are taken as `max_num_batched_tokens` rows of 4 D + 2 / R of the MLP's width in
        bfloat16, and `max_num_seqs` rows of 1 / R of the vocabulary in float32.

        Raises: CapacityError if nothing is left.
        """
        model, parallel = self.model, self.tensor_parallel_size
        row = 4 * model.hidden_size + 2 * model.intermediate_size // parallel
        logits = max_num_seqs * model.vocab_size * _LOGIT_BYTES // parallel
        budget = MemoryBudget(
            total_bytes=self.gpu.memory_bytes,
            free_bytes=self.gpu.memory_bytes,
            weight_bytes=self._size.total * _BYTES[self.weight_dtype] // parallel,
            activation_bytes=max_num_batched_tokens * row * _ACTIVATION_BYTES + logits,
            shared_with_host=False,
        )
        available = available_kv_bytes(budget, gpu_memory_utilization)
        return self.kv_spec(block_size).blocks_that_fit(available)
