"""`EngineConfig`: every limit and default of the engine, with units."""

import math
from dataclasses import dataclass

from paged.scheduler.eviction.policies import DEFAULT_POLICY, POLICIES
from paged.scheduler.lora_config import LoRAConfig
from paged.scheduler.prefill_limits import PrefillLimits
from paged.scheduler.prefix_cache import DEFAULT_HASH_ALGORITHM, HASH_ALGORITHMS
from paged.scheduler.request_queue import SCHEDULING_POLICIES
from paged.scheduler.structured.config import StructuredOutputsConfig

# By the names of the reference; "fp8" is the one that resolved settings spell out.
FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", *FP8_DTYPES)
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEFAULT_COMPILATION_CACHE_DIR = "~/.cache/paged/xla"
ATTENTION_BACKENDS = ("auto", "mosaic", "native", "triton", "xla")
LINEAR_BACKENDS = ("auto", "native", "xla")
# What is made of weights while they are loaded ("fp8", too), and what a checkpoint may be already.
QUANTIZATIONS = ("int8", "int4", "fp8", "awq", "compressed-tensors", "gptq")
PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")
DEFAULT_NATIVE_CACHE_DIR = "~/.cache/paged/native"
_STRUCTURED = StructuredOutputsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; names and defaults are vLLM's.

    Attributes:
      max_model_len: longest prompt plus output, tokens; None takes the model's own.
      max_num_seqs: most requests running at once; None takes the platform's default.
      max_num_batched_tokens: token budget of a step; None takes the platform's default.
      performance_mode: "balanced"; "throughput" doubles the defaults of the two limits above;
        "interactivity" has the next token of many users come sooner: finer buckets, and parts of at
        most an eighth of the budget for prompts that are not alone.
      block_size: tokens per KV block.
      gpu_memory_utilization: share of each device's memory for weights, activations and KV; on a
        CPU, the share of free memory that KV may take (and at most 2 GiB unless set otherwise).
      kv_cache_memory_bytes: bytes of KV on each device, instead of the share.
      num_gpu_blocks_override: blocks of KV, instead of the computed number.
      enable_prefix_caching: reuse the KV of equal prefixes.
      kv_cache_dtype: element type of the KV cache; "auto" is the model's, "fp8" is "fp8_e4m3".
      dtype: element type of weights and activations; "auto" is the checkpoint's.
      quantization: "int8", "int4" and "fp8" keep the weights of linear layers in so many bits;
        activations stay as they are. "awq", "gptq", "compressed-tensors" and "fp8" insist that the
        checkpoint is quantised so. None takes the weights as they are.
      seed: seed of the requests that bring none.
      attention_backend: "auto", "native" (the C++ kernels, on a CPU), "triton" (on an NVIDIA GPU),
        "mosaic" (for prefill, on Hopper and Blackwell) or "xla"; the names are promises.
      linear_backend: "auto", "native" or "xla", for matrix products.
      max_num_queued_reqs: most requests waiting before `AsyncEngine` refuses new ones; None: no
        bound. (`LLM` is handed its whole queue at once and refuses none of it.)
      scheduling_policy: "fcfs", or "priority" to serve by the requests' priorities.
      enable_chunked_prefill: let prompts enter in parts; without it the token budget must be at
        least `max_model_len`.
      long_prefill_token_threshold: most tokens of one prompt per step while others are there; 0:
        no limit.
      max_num_partial_prefills: most prompts that are partly computed at once; None: no limit.
      max_long_partial_prefills: how many of them may be longer than the threshold above (4% of
        `max_model_len` if that is 0); shorter prompts overtake the others. None: no limit.
      async_scheduling: plan each step while the device works on the one before; None does so
        unless the device is the CPU, whose cores the planning would take from the step.
      prefix_cache_policy: which cached block is evicted first, see `paged.scheduler.eviction`.
      prefix_caching_hash_algo: how blocks are named, see `paged.scheduler.prefix_cache`.
      kv_offloading_size: GiB of host memory for blocks evicted from the device; 0: none.
      kv_offloading_path: folder for blocks evicted from host memory; None: none.
      kv_offloading_disk_size: most GiB in that folder; None: until the disk is full.
      disable_hybrid_kv_cache_manager: keep all blocks of sliding-window layers.
      structured_outputs_config: what grammars may cost, and how JSON is written.
      kv_cache_metrics: follow some KV blocks, and report how long they stay.
      kv_cache_metrics_sample: share of their allocations that are followed.
      enable_mfu_metrics: estimate arithmetic and memory traffic of every step.
      generation_config: "auto" takes sampling defaults from the checkpoint, "vllm" ignores them.
      compilation_cache_dir: folder of compiled programs; None turns the cache off.
      native_cache_dir: folder of the C++ kernels, which are compiled on first use.
      tensor_parallel_size: devices that share the model: heads, MLP features and vocabulary are
        split over them.
      enable_expert_parallel: in a mixture of experts, give each of them whole experts instead of a
        part of every expert.
      enable_lora: let requests name LoRA adapters (`LoRARequest`).
      max_loras, max_lora_rank, max_cpu_loras, lora_dtype, lora_target_modules: see `LoRAConfig`;
        without `enable_lora` they mean nothing.
      artifact: folder of programs exported by `paged compile`, to be used instead of tracing the
        model; settings that are inside them must agree. None traces it.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    performance_mode: str = "balanced"
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    max_num_queued_reqs: int | None = None
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    async_scheduling: bool | None = None
    prefix_cache_policy: str = DEFAULT_POLICY
    prefix_caching_hash_algo: str = DEFAULT_HASH_ALGORITHM
    kv_offloading_size: float = 0.0
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float | None = None
    disable_hybrid_kv_cache_manager: bool = False
    structured_outputs_config: StructuredOutputsConfig = _STRUCTURED
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    enable_mfu_metrics: bool = False
    generation_config: str = "auto"
    compilation_cache_dir: str | None = DEFAULT_COMPILATION_CACHE_DIR
    native_cache_dir: str = DEFAULT_NATIVE_CACHE_DIR
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    lora_target_modules: tuple[str, ...] | None = None
    artifact: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_positive(name, getattr(self, name))
        for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_queued_reqs"):
            _check_positive(name, getattr(self, name))
        _check_positive("tensor_parallel_size", self.tensor_parallel_size)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]."
            )
        _check_choice("performance_mode", self.performance_mode, PERFORMANCE_MODES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("linear_backend", self.linear_backend, LINEAR_BACKENDS)
        _check_choice("generation_config", self.generation_config, ("auto", "vllm"))
        _check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("prefix_cache_policy", self.prefix_cache_policy, POLICIES)
        _check_choice("prefix_caching_hash_algo", self.prefix_caching_hash_algo, HASH_ALGORITHMS)
        if not 0 < self.kv_cache_metrics_sample <= 1:
            raise ValueError(
                f"kv_cache_metrics_sample={self.kv_cache_metrics_sample} must be in (0, 1]; to "
                "follow no blocks leave kv_cache_metrics off."
            )
        self.prefill_limits  # noqa: B018 - checks them
        self.lora_config  # noqa: B018 - checks it
        if self.enable_lora and self.artifact is not None:
            raise ValueError(
                "artifact has programs without room for LoRA adapters; leave it or enable_lora out."
            )
        self._check_offloading()
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens={budget} must be at least max_num_seqs={seqs}, or some "
                "running request could never decode; raise the one or lower the other."
            )

    @property
    def prefill_limits(self) -> PrefillLimits:
        """The limits on prompts that are computed in parts."""
        return PrefillLimits(
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
        )

    @property
    def lora_config(self) -> LoRAConfig | None:
        """The settings of LoRA adapters; None if requests may name none."""
        config = LoRAConfig(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
            lora_dtype=self.lora_dtype,
            target_modules=self.lora_target_modules,
        )
        return config if self.enable_lora else None

    def _check_offloading(self) -> None:
        for name in ("kv_offloading_size", "kv_offloading_disk_size"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a number of GiB, at least 0.")
        if self.kv_offloading_path is not None and not self.kv_offloading_size:
            raise ValueError(
                f"kv_offloading_path={self.kv_offloading_path!r} needs kv_offloading_size: blocks "
                "reach the disk through host memory; 1 (GiB) is a start."
            )
        if self.kv_offloading_disk_size is not None and self.kv_offloading_path is None:
            raise ValueError(
                "kv_offloading_disk_size says how much of kv_offloading_path may be used; set that "
                "folder, too."
            )
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size needs enable_prefix_caching: blocks are found again by their "
                "prefix; turn the one on or the other off."
            )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The three limits that every step obeys, resolved for a model and a device.

    Attributes:
      max_model_len: longest prompt plus output, tokens.
      max_num_seqs: most requests running at once.
      max_num_batched_tokens: token budget of a step.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, config: EngineConfig) -> "StepLimits":
        """Return the limits of a config whose defaults are resolved.

        Raises:
          RuntimeError: if one of them still waits for its default.
        """
        limits = (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens)
        if None in limits:
            raise RuntimeError("Call resolve_config() first: a limit has no value yet.")
        return cls(*(limit for limit in limits if limit is not None))


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}.")
