"""`make_plan`: what fits where, how fast it should be, and which flags to start with."""

import dataclasses
from collections.abc import Sequence

from paged.kv_cache import KVCacheSpec
from paged.models.config import ModelConfig
from paged.models.model_size import ModelSize, model_size
from paged.models.quantization import resolve_quantization
from paged.models.tensor_parallel import TensorParallel
from paged.models.weights import resolve_dtype
from paged.scheduler.backend_choice import kv_element_type
from paged.scheduler.config import EngineConfig
from paged.scheduler.planning.advice import Suggestion, suggest
from paged.scheduler.planning.fit import Fit, fit
from paged.scheduler.planning.speed import Efficiencies, Speed
from paged.scheduler.planning.workload import Workload
from paged.scheduler.resolution import gpu_limits
from paged.scheduler.simulator.gpus import GPU

PARALLEL_SIZES = (1, 2, 4, 8)
"""GPUs of a node that are tried if no number is given."""
PRECISIONS = (None, "int8", "fp8", "int4")
"""What weights are kept in, as `--quantization` says; None: as the checkpoint has them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What is asked; None: the plan chooses, or takes the engine's default.

    Attributes:
      workload: the requests.
      efficiencies: assumptions of the roofline.
      tensor_parallel_size, quantization, kv_cache_dtype, block_size, max_num_seqs,
      max_num_batched_tokens, gpu_memory_utilization: as in `EngineConfig`.
    """

    workload: Workload = dataclasses.field(default_factory=Workload)
    efficiencies: Efficiencies = dataclasses.field(default_factory=Efficiencies)
    tensor_parallel_size: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.92


@dataclasses.dataclass(frozen=True)
class GPUPlan:
    """A model on one kind of GPU.

    Attributes:
      gpu: its figures.
      fits: every number of GPUs and precision tried, fp8 caches after others.
      chosen: what is predicted and suggested for; None: no request of the workload fits.
      suggestions: flags for it.
    """

    gpu: GPU
    fits: tuple[Fit, ...]
    chosen: Speed | None
    suggestions: tuple[Suggestion, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model's sizes, and where it fits.

    Attributes:
      name, model, size: the model.
      bytes_per_token: keys and values of one token on all devices together, in the chosen type.
      kv_cache_dtype: that type.
      settings: what was asked.
      gpus: one for each kind.
    """

    name: str
    model: ModelConfig
    size: ModelSize
    bytes_per_token: int
    kv_cache_dtype: str
    settings: PlanSettings
    gpus: tuple[GPUPlan, ...]


def make_plan(name: str, model: ModelConfig, gpus: Sequence[GPU], settings: PlanSettings) -> Plan:
    """Return a plan.

    Args:
      name: what the model is called.
      model: its shape.
      gpus: kinds of GPU to plan for.
      settings: what is asked.

    Raises: ValueError for requests longer than the model's context, a number of GPUs that the
      model cannot be split over, and settings that contradict each other or the checkpoint.
    """
    longest, total = model.max_position_embeddings, settings.workload.total_len
    if total > longest:
        raise ValueError(
            f"input_len + output_len = {total} exceeds the {longest} positions that the model was "
            "made for; lower --input-len or --output-len."
        )
    dtype = resolve_dtype("auto", model)
    kv_cache_dtype = settings.kv_cache_dtype or dtype
    spec = KVCacheSpec(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        block_size=1,
        dtype=kv_element_type(kv_cache_dtype),
        num_planes=model.kv_planes,
    )
    sizes = _parallel_sizes(model, settings.tensor_parallel_size)
    plans = tuple(_plan_gpu(model, gpu, sizes, dtype, settings) for gpu in gpus)
    return Plan(
        name, model, model_size(model), spec.bytes_per_token, kv_cache_dtype, settings, plans
    )


def _plan_gpu(
    model: ModelConfig, gpu: GPU, sizes: Sequence[int], dtype: str, settings: PlanSettings
) -> GPUPlan:
    kv_dtypes = [settings.kv_cache_dtype] if settings.kv_cache_dtype else [dtype, "fp8"]
    fits = tuple(
        _fit(model, gpu, settings, size, quantization, dtype, kv_dtype)
        for kv_dtype in kv_dtypes
        for size in sizes
        for quantization in _precisions(model, settings.quantization)
    )
    found = _choose(fits, settings.workload)
    if found is None:
        return GPUPlan(gpu, fits, None, ())
    speed = Speed(model, found, settings.workload, settings.efficiencies)
    suggestions = suggest(speed, kv_cache_dtype_is_open=settings.kv_cache_dtype is None)
    return GPUPlan(gpu, fits, speed, tuple(suggestions))


def _fit(
    model: ModelConfig,
    gpu: GPU,
    settings: PlanSettings,
    num_gpus: int,
    quantization: str | None,
    dtype: str,
    kv_dtype: str,
) -> Fit:
    max_num_seqs, max_num_batched_tokens = gpu_limits(gpu.memory_bytes, gpu.name)
    tokens = settings.max_num_batched_tokens or max(
        max_num_batched_tokens, settings.max_num_seqs or 0
    )
    config = EngineConfig(
        max_num_seqs=settings.max_num_seqs or min(max_num_seqs, tokens),
        max_num_batched_tokens=tokens,
        block_size=settings.block_size or 16,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype="fp8_e4m3" if kv_dtype == "fp8" else kv_dtype,
        tensor_parallel_size=num_gpus,
    )
    return fit(model, gpu, config, settings.workload)


def _precisions(model: ModelConfig, requested: str | None) -> list[str | None]:
    """Return what `--quantization` may say for a checkpoint: one thing if it is quantised."""
    stored = None if model.quantization is None else model.quantization.method
    if requested is not None or stored is not None:
        return [resolve_quantization(requested, stored)]
    return list(PRECISIONS)


def _parallel_sizes(model: ModelConfig, requested: int | None) -> list[int]:
    if requested is not None:
        return [_checked_size(model, requested)]
    sizes = []
    for size in PARALLEL_SIZES:
        try:
            sizes.append(_checked_size(model, size))
        except ValueError:
            continue
    return sizes


def _checked_size(model: ModelConfig, size: int) -> int:
    """Return the size; raises `ValueError` if there are no equal parts, or no such weights."""
    split = TensorParallel(model, size)
    if model.quantization is not None:
        split.check_quantized_weights(None)
    return size


def _choose(fits: Sequence[Fit], workload: Workload) -> Fit | None:
    """Return the fewest GPUs that hold a request with weights as they are; else in fewer bits."""
    kv_name = fits[0].kv_name
    order = [
        one
        for precision in dict.fromkeys(one.weights_name for one in fits)
        for one in fits
        if one.weights_name == precision and one.kv_name == kv_name
    ]
    return next((one for one in order if one.requests(workload.total_len)), None)
