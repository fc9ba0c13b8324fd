"""`Roofline`: how long a step takes on a GPU, and how many KV blocks fit beside the weights."""

from dataclasses import dataclass, field
from typing import NamedTuple

from paged.kv_cache import KVCacheSpec
from paged.models.config import ModelConfig
from paged.models.model_size import ModelSize, model_size
from paged.models.weight_bytes import WeightBytes
from paged.scheduler.capacity import MemoryBudget, available_kv_bytes
from paged.scheduler.simulator.gpus import GPU
from paged.scheduler.simulator.step_cost import StepLoad
from paged.scheduler.step_work import read_weights, step_flops

# Storage types by the names of the command line: bytes per element and NumPy name.
_BYTES = {"bfloat16": 2, "fp8": 1}
_NUMPY_NAMES = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}

_ACTIVATION_BYTES = 2  # activations are bfloat16
_LOGIT_BYTES = 4  # and logits float32


class StepWork(NamedTuple):
    """What a step costs, before it is divided by what a GPU can do.

    Attributes:
      flops: of all GPUs together.
      weight_bytes, kv_bytes: that one GPU reads or writes.
      link_bytes: that one GPU sends to others.
    """

    flops: int
    weight_bytes: int
    kv_bytes: int
    link_bytes: float


@dataclass(frozen=True)
class Roofline:
    """The time of a step from data-sheet figures; a `StepCost`.

    With T new tokens, S sampled rows, P attended pairs and C context tokens in the step, L layers,
    N q heads, K kv heads, head dim H, model width D, and tensor parallelism over R GPUs:

        flops   = 2 T layer_matmul + 2 S head + 4 L N H P
        bytes   = (layers + experts touched + head if S) weight_bytes
                + (C + T) 2 L K H kv_bytes (without the 2 for latent attention, where K is 1)
        touched = 1 - (1 - k / E) ** T
        compute = flops / R / (compute_efficiency * peak)
        memory  = bytes / R / (memory_efficiency * bandwidth)
        reduce  = 2 L * 2 (R - 1) / R * T D * 2 bytes / link
        seconds = step_overhead_seconds + max(compute, memory) + reduce

    4 L N H P counts the products of queries with keys and of weights with values, causally: the
    first n tokens of a prompt are n (n + 1) / 2 pairs. Weights are read once per step, keys and
    values once per row. If R exceeds K, kv heads are repeated and each GPU reads 1 / K of the
    cache. Of E experts, k for each token, those are read that some token chose, if tokens choose
    evenly and independently. Left out: activations in memory, the quantization of activations,
    uneven rows, and what kernels lose, which the two efficiencies stand for.

    Attributes:
      gpu, model: what runs what.
      tensor_parallel_size: GPUs that share every layer.
      weight_dtype, kv_cache_dtype: "bfloat16" or "fp8"; products are 8-bit if the weights are.
      compute_efficiency, memory_efficiency: share of the data sheet's figures that a whole step
        reaches; assumptions. A large matrix product alone reaches 0.8 of an H200's peak and a copy
        0.9 of its bandwidth; steps are made of smaller things.
      step_overhead_seconds: host time per step that nothing hides; an assumption.
      weights: of one GPU, as the engine stores them, in any precision; it widens them, so that
        products are 16-bit. None: every parameter is of `weight_dtype`.

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
    weights: WeightBytes | None = None
    _size: ModelSize = field(init=False, repr=False)
    _weights: WeightBytes = field(init=False, repr=False)
    _kv_token_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("weight_dtype", "kv_cache_dtype"):
            if getattr(self, name) not in _BYTES:
                raise ValueError(f"{name}={getattr(self, name)!r} must be bfloat16 or fp8.")
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in (0, 1].")
        heads, parallel = self.model.num_q_heads, self.tensor_parallel_size
        if self.weights is not None and self.weight_dtype != "bfloat16":
            raise ValueError(
                f"weight_dtype={self.weight_dtype!r} contradicts weights, which says what is "
                "stored; give one of them."
            )
        if parallel < 1 or heads % parallel:
            raise ValueError(
                f"tensor_parallel_size={parallel} must divide the {heads} q heads of the model."
            )
        # Cached: one step in a million must not count the parameters again.
        object.__setattr__(self, "_size", model_size(self.model))
        object.__setattr__(self, "_weights", self.weights or self._even_weights())
        object.__setattr__(self, "_kv_token_bytes", self.kv_spec(1).bytes_per_token)

    @property
    def name(self) -> str:
        """GPU and how many."""
        parallel = self.tensor_parallel_size
        return self.gpu.name if parallel == 1 else f"{parallel} x {self.gpu.name}"

    def step_seconds(self, load: StepLoad) -> float:
        """Return the time of a step, in seconds."""
        work, gpu = self.step_work(load), self.gpu
        memory = work.weight_bytes + work.kv_bytes
        busy = max(self.compute_seconds(work), self.memory_seconds(memory))
        return self.step_overhead_seconds + busy + work.link_bytes / gpu.link_bytes_per_second

    def compute_seconds(self, work: "StepWork") -> float:
        """Return the time of a step's arithmetic on each GPU, in seconds."""
        peak = self.gpu.fp8_flops if self.weight_dtype == "fp8" else self.gpu.bf16_flops
        return work.flops / self.tensor_parallel_size / (self.compute_efficiency * peak)

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the time in which a GPU reads so many bytes, in seconds."""
        return num_bytes / (self.memory_efficiency * self.gpu.bytes_per_second)

    def step_work(self, load: StepLoad) -> "StepWork":
        """Return what a step computes and moves; bytes are those of one GPU."""
        size, model, parallel = self._size, self.model, self.tensor_parallel_size
        flops = step_flops(model, size, load)
        weights = read_weights(model, self._weights, load)
        # `_kv_token_bytes` is one GPU's share already.
        kv_bytes = (load.context_tokens + load.num_tokens) * self._kv_token_bytes
        reduced = 2 * model.num_layers * load.num_tokens * model.hidden_size * _ACTIVATION_BYTES
        return StepWork(flops, weights, kv_bytes, 2 * (parallel - 1) / parallel * reduced)

    def _even_weights(self) -> WeightBytes:
        """Return one GPU's weights if all parameters have the same type."""
        size, share = self._size, _BYTES[self.weight_dtype] / self.tensor_parallel_size
        per_token = 0
        if self.model.experts is not None:
            num_chosen, num_all = (
                self.model.experts.num_experts_per_token,
                self.model.experts.num_experts,
            )
            per_token = size.experts * num_chosen // num_all
        return WeightBytes(
            layers=int((size.layer_matmul - per_token) * share),
            experts=int(size.experts * share),
            head=int(size.head * share),
            embedding=0,
        )

    def kv_spec(self, block_size: int) -> KVCacheSpec:
        """Return what a block holds on one GPU."""
        return KVCacheSpec(
            num_layers=self.model.num_layers,
            num_kv_heads=max(1, self.model.num_kv_heads // self.tensor_parallel_size),
            head_dim=self.model.head_dim,
            block_size=block_size,
            dtype=_NUMPY_NAMES[self.kv_cache_dtype],
            num_planes=self.model.kv_planes,
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
