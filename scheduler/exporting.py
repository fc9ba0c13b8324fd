"""`compile_artifact`: exports all programs of an engine, for this machine or an absent GPU."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from paged import backends
from paged.models.artifact import ArtifactWriter
from paged.models.checkpoint import open_checkpoint
from paged.scheduler.artifacts import artifact_settings
from paged.scheduler.capacity import check_one_request_fits
from paged.scheduler.config import EngineConfig, StepLimits
from paged.scheduler.memory import kv_cache_spec, size_kv_cache
from paged.scheduler.placement import Placement
from paged.scheduler.resolution import cache_groups, make_bucket_table, resolve_config
from paged.scheduler.step_programs import compile_programs, step_layout
from paged.sharding import TENSOR_AXIS

logger = logging.getLogger(__name__)

# Of a GPU's memory, what JAX takes for its pool unless it is told otherwise.
_POOL_SHARE = 0.75


def compile_artifact(
    model: str | None,
    config: EngineConfig,
    folder: str | pathlib.Path,
    *,
    gpu: str | None = None,
    progress: bool = True,
    revision: str | None = None,
    token: str | None = None,
    models_cache_dir: str | None = None,
) -> None:
    """Export every program of an engine; no weights are read, and nothing runs.

    Args:
      model, revision, token, models_cache_dir: as in `load_engine`.
      config: settings; without `num_gpu_blocks_override` the blocks are those that fit the GPU's
        memory as JAX shares it out by default.
      folder: of the artifact; missing or empty.
      gpu: a name in `paged.gpu.aot.TARGETS`; None: the device of this machine.
      progress: show a bar on standard error.

    Raises:
      ValueError: if the folder holds something, a setting contradicts the model, or a backend
        cannot be exported.
      RuntimeError: if `gpu` is named and JAX's CUDA plugin is missing.
      CheckpointError, UnsupportedModelError, CapacityError: as `load_engine`.
    """
    if config.enable_lora:
        raise ValueError(
            "enable_lora: programs with LoRA adapters are not exported; leave it out, and let the "
            "compile cache keep them."
        )
    folder = pathlib.Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; remove it or choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(model, revision=revision, token=token, cache_dir=models_cache_dir)
    shape = checkpoint.model_config
    with _compiling_for(gpu, config.tensor_parallel_size) as mesh:
        is_cpu = backends.current_platform() == "cpu"
        config = resolve_config(_exportable(config) if is_cpu else config, shape)
        limits, groups = StepLimits.of(config), cache_groups(config, shape)
        placement = Placement.of(config, shape.for_context(limits.max_model_len), mesh)
        spec = kv_cache_spec(config, placement.split.part, groups)
        num_blocks = size_kv_cache(spec, config, placement)
        check_one_request_fits(
            spec,
            num_blocks,
            limits.max_model_len,
            tuple(group.sliding_window for group in groups),
            num_tokens_in_flight=limits.max_num_batched_tokens,
        )
        config = dataclasses.replace(config, num_gpu_blocks_override=num_blocks)
        writer = ArtifactWriter(folder, "cpu" if is_cpu else "cuda")
        table = make_bucket_table(config)
        logger.info("Exporting %d shapes of a step to %s.", len(table.buckets), folder)
        compile_programs(
            table,
            functools.partial(
                step_layout,
                max_blocks_per_seq=spec.blocks_for(limits.max_model_len),
                vocab_size=shape.vocab_size,
                num_groups=len(groups),
            ),
            placement.graphdef(config, groups),
            placement.abstract_params(config),
            placement.abstract_kv_cache(spec, num_blocks),
            max_num_seqs=limits.max_num_seqs,
            store=placement.programs(writer),
            progress=progress,
        )
        writer.finish(artifact_settings(config, shape))


def _exportable(config: EngineConfig) -> EngineConfig:
    """Return settings for a CPU in which "auto" is what can be exported."""
    chosen: dict[str, Any] = {}
    for name in ("attention_backend", "linear_backend"):
        value = getattr(config, name)
        if value == "native":
            raise ValueError(
                f"{name}='native' cannot be compiled ahead: native kernels belong to a machine, "
                "and programs with them are kept by the compile cache; use 'xla'."
            )
        chosen[name] = "xla" if value == "auto" else value
    return dataclasses.replace(config, **chosen)


@contextlib.contextmanager
def _compiling_for(gpu: str | None, num_devices: int) -> Iterator[Mesh | None]:
    """Yield the devices that are not here; None for those of this machine."""
    if gpu is None:
        yield None
        return
    # Imported here: it needs JAX's CUDA plugin only for this.
    from paged.gpu.aot import Target

    target = Target(gpu, {TENSOR_AXIS: num_devices})
    pool_bytes = int(_POOL_SHARE * target.memory_bytes)
    with backends.compiling_for(target.device, memory_bytes=pool_bytes):
        yield target.mesh
