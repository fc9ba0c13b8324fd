"""`load_engine`: from a model's name and settings to an engine whose steps are all compiled."""

import concurrent.futures
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from paged.backends import keep_freed_memory
from paged.cache_groups import CacheGroup, one_group
from paged.kv_cache import KVCacheSpec
from paged.models.adapter import read_adapter
from paged.models.artifact import Artifact, ArtifactPrograms
from paged.models.checkpoint import Checkpoint, open_checkpoint
from paged.models.compilation import make_cache_directory, no_persistent_cache, persistent_cache
from paged.models.config import ModelConfig
from paged.models.executables import ExecutableStore
from paged.models.linear_packing import pack_linear_layers
from paged.models.lora_layers import AdaptableModel
from paged.models.programs import ProgramSource
from paged.models.weight_bytes import count_weight_bytes
from paged.scheduler.admission import InputProcessor
from paged.scheduler.artifacts import agree_with_artifact
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.block_residency import ResidencySampler
from paged.scheduler.capacity import check_one_request_fits, describe_capacity
from paged.scheduler.config import EngineConfig, StepLimits
from paged.scheduler.engine import Engine
from paged.scheduler.eviction.policies import make_policy
from paged.scheduler.lora_store import LoRAStore
from paged.scheduler.memory import kv_cache_spec, size_kv_cache
from paged.scheduler.offloading import BlockMover, check_offloading, make_tiers
from paged.scheduler.placement import Placement
from paged.scheduler.prefix_cache import PrefixHasher
from paged.scheduler.resolution import cache_groups, make_bucket_table, resolve_config
from paged.scheduler.runner import ModelRunner
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.startup import Phase, StartupPhases
from paged.scheduler.step_work import StepWorkEstimate
from paged.scheduler.structured.compiler import GrammarCompiler
from paged.scheduler.tiers.manager import TierManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what it was made from.

    Attributes:
      engine: ready to step.
      checkpoint: the model's files.
      config: settings with every default resolved.
      max_model_len: longest prompt plus output, tokens.
      cache_info: settings of the KV cache as text.
      startup_phases: of loading, in order.
    """

    engine: Engine
    checkpoint: Checkpoint
    config: EngineConfig
    max_model_len: int
    cache_info: Mapping[str, str]
    startup_phases: Sequence[Phase] = ()


def load_engine(
    model: str | None,
    config: EngineConfig,
    *,
    progress: bool = True,
    revision: str | None = None,
    token: str | None = None,
    models_cache_dir: str | None = None,
) -> LoadedEngine:
    """Load a checkpoint, size and allocate its KV cache and compile every step.

    Args:
      model: local directory, GGUF file or Hub id; None is the demo model.
      config: settings.
      progress: show progress bars on standard error.
      revision, token: for a model on the Hub.
      models_cache_dir: folder of the demo model; None takes ~/.cache/paged-models.

    Raises:
      CheckpointError: the files are missing or broken.
      UnsupportedModelError: the architecture, or a feature of it, is not implemented.
      CapacityError: the KV cache would be too small for one request.
      ValueError: a setting contradicts the model.
    """
    phases = StartupPhases()
    # First of all: it takes no time, and would otherwise be found out after the weights.
    make_cache_directory(config.compilation_cache_dir)
    with phases.phase("open checkpoint"):
        checkpoint = open_checkpoint(
            model, revision=revision, token=token, cache_dir=models_cache_dir
        )
        if config.artifact is not None:
            config = agree_with_artifact(config, checkpoint.model_config)
        config = resolve_config(config, checkpoint.model_config, progress=progress)
        tokenizer = checkpoint.tokenizer
    logger.info(
        "Starting to load model %s (%s).", checkpoint.name, checkpoint.model_config.architecture
    )
    limits = StepLimits.of(config)
    placement = Placement.of(config, checkpoint.model_config.for_context(limits.max_model_len))
    adaptable = _adaptable_model(config, checkpoint.model_config)
    groups = cache_groups(config, checkpoint.model_config)
    windows = tuple(group.sliding_window for group in groups)
    spec = kv_cache_spec(config, placement.split.part, groups)
    num_blocks = _size_pool(config, placement, spec, windows)
    _check_tiers(config, windows)
    hasher = PrefixHasher(config.prefix_caching_hash_algo)
    grammars = GrammarCompiler.of_model(
        tokenizer,
        vocab_size=checkpoint.model_config.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        config=config.structured_outputs_config,
    )
    grammars.start_loading()
    runner, tiers = _load_runner(
        checkpoint,
        config,
        placement,
        spec,
        num_blocks,
        groups,
        phases,
        adaptable=adaptable,
        progress=progress,
    )
    logger.info("%s", phases.table())
    engine = Engine(
        scheduler=_make_scheduler(config, num_blocks, windows, hasher, tiers),
        runner=runner,
        async_scheduling=bool(config.async_scheduling),
        grammars=grammars,
        loras=None if adaptable is None else _make_lora_store(config, adaptable),
        tiers=tiers,
        estimate_work=_work_estimate(config, placement) if config.enable_mfu_metrics else None,
        tokenizer=tokenizer,
        processor=InputProcessor(
            tokenizer,
            vocab_size=checkpoint.model_config.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            seed=config.seed,
        ),
    )
    return LoadedEngine(
        engine=engine,
        checkpoint=checkpoint,
        config=config,
        max_model_len=limits.max_model_len,
        cache_info=_cache_info(config, num_blocks),
        startup_phases=phases.phases,
    )


def _size_pool(
    config: EngineConfig, placement: Placement, spec: KVCacheSpec, windows: Sequence[int | None]
) -> int:
    """Return the blocks of the KV cache, the null block included, and log what they hold.

    Before the weights: a pool too small should not cost the minutes that those may take.
    """
    limits = StepLimits.of(config)
    num_blocks = size_kv_cache(spec, config, placement)
    in_flight = limits.max_num_batched_tokens
    check_one_request_fits(
        spec, num_blocks, limits.max_model_len, windows, num_tokens_in_flight=in_flight
    )
    capacity = describe_capacity(
        spec, num_blocks, limits.max_model_len, windows, num_tokens_in_flight=in_flight
    )
    logger.info("%s", capacity)
    if config.kv_cache_dtype == "fp8_e4m3":
        logger.warning(
            "The fp8 KV cache stores keys and values as they are (scales of 1.0): scales of "
            "checkpoints are not read yet, and what exceeds 448 is clipped."
        )
    return num_blocks


def _work_estimate(config: EngineConfig, placement: Placement) -> StepWorkEstimate:
    split = placement.split
    # Of all layers, not of the one group that a block holds.
    kv_spec = kv_cache_spec(config, split.part, one_group(split.part.num_layers))
    weights = count_weight_bytes(split.part, dtype=config.dtype, quantization=config.quantization)
    return StepWorkEstimate(split.config, weights, kv_spec.bytes_per_token, split.size)


def _make_scheduler(
    config: EngineConfig,
    num_blocks: int,
    windows: Sequence[int | None],
    hasher: PrefixHasher,
    tiers: TierManager | None,
) -> Scheduler:
    limits, prefill = StepLimits.of(config), config.prefill_limits
    pool = BlockPool(
        num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        policy=make_policy(config.prefix_cache_policy),
    )
    if config.kv_cache_metrics:
        pool.residency = ResidencySampler(config.kv_cache_metrics_sample)
    return Scheduler(
        pool=pool,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=prefill.long_prefill_token_threshold,
        max_num_partial_prefills=prefill.max_num_partial_prefills,
        max_long_partial_prefills=prefill.max_long_partial_prefills,
        windows=windows,
        hasher=hasher,
        max_loras=config.max_loras if config.enable_lora else 0,
        tiers=tiers,
    )


def _adaptable_model(config: EngineConfig, model: ModelConfig) -> AdaptableModel | None:
    """Return what adapters may change of a model; None if requests may name none."""
    loras = config.lora_config
    return None if loras is None else AdaptableModel.of(model, loras.target_modules)


def _make_lora_store(config: EngineConfig, model: AdaptableModel) -> LoRAStore:
    loras = config.lora_config
    assert loras is not None
    read = functools.partial(
        read_adapter, model=model, max_rank=loras.max_lora_rank, dtype=loras.lora_dtype
    )
    return LoRAStore(read, loras.num_host_loras)


def _load_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    placement: Placement,
    spec: KVCacheSpec,
    num_blocks: int,
    groups: tuple[CacheGroup, ...],
    phases: StartupPhases,
    *,
    adaptable: AdaptableModel | None,
    progress: bool,
) -> tuple[ModelRunner, TierManager | None]:
    """Load the weights, allocate the KV cache and its tiers, and compile every step."""
    limits, model = StepLimits.of(config), placement.split.config
    graphdef = placement.graphdef(config, groups)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Gigabytes of zeros on a CPU, written while the weights are read.
        allocating = pool.submit(placement.allocate_kv_cache, spec, num_blocks)
        with phases.phase("load weights"):
            params = checkpoint.load_params(
                model,
                dtype=config.dtype,
                quantization=config.quantization,
                shardings=placement.param_shardings(config),
                kv_head_copies=placement.split.kv_head_copies,
                progress=progress,
            )
            if config.linear_backend == "native":
                params = pack_linear_layers(graphdef, params, progress=progress)
    with phases.phase("allocate KV cache"):
        kv_cache = allocating.result()
        mover = BlockMover(kv_cache, has_tiers=config.kv_offloading_size > 0)
        tiers = make_tiers(config, mover.transfer, params)
        loras = None if adaptable is None else placement.allocate_loras(config, adaptable)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    runner = ModelRunner(
        graphdef,
        params,
        kv_cache,
        max_num_seqs=limits.max_num_seqs,
        max_blocks_per_seq=spec.blocks_for(limits.max_model_len),
        vocab_size=model.vocab_size,
        num_groups=len(groups),
        block_mover=mover,
        params_layout=placement.params_layout(config, graphdef),
        loras=loras,
    )
    table = make_bucket_table(config)
    logger.info("Compiling for %d shapes of a step.", len(table.buckets))
    with phases.phase("compile steps"):
        with no_persistent_cache():
            store = placement.programs(_program_source(config, model, groups))
            runner.warmup(table, store=store, progress=progress)
        with persistent_cache(config.compilation_cache_dir):
            mover.warmup()
    return runner, tiers


def _program_source(
    config: EngineConfig, model: ModelConfig, groups: tuple[CacheGroup, ...]
) -> ProgramSource:
    """Return programs of this model and config: compiled by earlier starts, exported, or new."""
    path = make_cache_directory(config.compilation_cache_dir)
    artifact = None if config.artifact is None else Artifact.open(config.artifact)
    store = ExecutableStore(
        path and path / "executables",
        f"{model} {groups} {config.dtype} {config.attention_backend} {config.linear_backend} "
        f"{config.tensor_parallel_size} {config.enable_expert_parallel} {config.lora_config}",
        "" if artifact is None else artifact.digest,
    )
    return store if artifact is None else ArtifactPrograms(artifact, store)


def _check_tiers(config: EngineConfig, windows: Sequence[int | None]) -> None:
    """Refuse, before the weights are loaded, what the tiers cannot do."""
    if config.kv_offloading_size and len(windows) > 1:
        raise ValueError(
            "kv_offloading_size does not work with a model that mixes full and sliding-window "
            "layers; set disable_hybrid_kv_cache_manager, or leave offloading off."
        )
    check_offloading(config)


def _cache_info(config: EngineConfig, num_blocks: int) -> dict[str, str]:
    return {
        "block_size": str(config.block_size),
        "cache_dtype": config.kv_cache_dtype,
        "disable_hybrid_kv_cache_manager": str(config.disable_hybrid_kv_cache_manager),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        # Not kv_offloading_path: the metrics page may be open, and a path names users and machines.
        "kv_offloading_disk_size": str(config.kv_offloading_disk_size),
        "kv_offloading_size": str(config.kv_offloading_size),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "max_num_seqs": str(config.max_num_seqs),
        "num_gpu_blocks": str(num_blocks),
        "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
        "prefix_cache_policy": config.prefix_cache_policy,
        "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "enable_expert_parallel": str(config.enable_expert_parallel),
    }
