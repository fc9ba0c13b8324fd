"""`Placement`: which devices an engine's model lies on, and how it is split between them."""

import dataclasses
import logging
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from paged.backends import DeviceMemory, device_memory
from paged.cache_groups import CacheGroup
from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.models.config import ModelConfig
from paged.models.forward import GraphDef, abstract_model
from paged.models.lora_arrays import LoRAArrays
from paged.models.lora_layers import AdaptableModel
from paged.models.params_layout import ParamsLayout
from paged.models.programs import ProgramSource
from paged.models.sharded_programs import ShardedPrograms
from paged.models.tensor_parallel import TensorParallel
from paged.scheduler.config import EngineConfig
from paged.sharding import KV_CACHE_AXES, TENSOR_AXIS, ShardingRules, tensor_parallel_mesh

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The devices of an engine, and what each of them has.

    Attributes:
      split: the model's parts; one part is the model itself.
      mesh: the devices; None: one, which nothing is placed on explicitly.
    """

    split: TensorParallel
    mesh: Mesh | None

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, mesh: Mesh | None = None) -> "Placement":
        """Return the placement that the settings ask for.

        Args:
          config: settings.
          model: shape of the model.
          mesh: devices to compile for that are not here; None: those of this process.

        Raises:
          ValueError: if the model cannot be split like this, or there are too few devices.
        """
        split = split_of(config, model)
        if split.size == 1:
            return cls(split, None)
        split.check_quantized_weights(config.quantization)
        mesh = tensor_parallel_mesh(split.size) if mesh is None else mesh
        logger.info(
            "Tensor parallelism over %d devices (%s), mesh %s: each has %d of %d query heads and "
            "%d of %d kv heads.",
            split.size,
            mesh.devices.flat[0].device_kind,
            dict(mesh.shape),
            split.part.num_q_heads,
            model.num_q_heads,
            split.part.num_kv_heads,
            model.num_kv_heads,
        )
        return cls(split, mesh)

    def graphdef(self, config: EngineConfig, groups: tuple[CacheGroup, ...]) -> GraphDef:
        """Return the structure of what one device computes."""
        return self._abstract(self.split.part, config, groups)[0]

    def param_shardings(self, config: EngineConfig) -> Any:
        """Return where each parameter lives; None leaves them on the one device."""
        if self.mesh is None:
            return None
        return self.split.param_shardings(
            self.mesh, dtype=config.dtype, quantization=config.quantization
        )

    def params_layout(self, config: EngineConfig, graphdef: GraphDef) -> ParamsLayout:
        """Return what brings parameters of a checkpoint's layout to the devices.

        Args:
          config: resolved settings.
          graphdef: see `graphdef`.
        """
        return ParamsLayout(
            graphdef,
            self._abstract(self.split.config, config, None)[1],
            shardings=self.param_shardings(config),
            kv_head_copies=self.split.kv_head_copies,
            is_packed=config.linear_backend == "native",
        )

    def allocate_loras(self, config: EngineConfig, model: AdaptableModel) -> LoRAArrays | None:
        """Return room for the adapters of requests; None if they have none.

        Args:
          config: resolved settings.
          model: what adapters may change.
        """
        loras = config.lora_config
        if loras is None:
            return None
        mesh, rules = self.mesh, self.split.rules
        return LoRAArrays(
            model.layers,
            max_loras=loras.max_loras,
            max_rank=loras.max_lora_rank,
            dtype=loras.lora_dtype,
            kv_head_copies=self.split.kv_head_copies,
            place=lambda axes: None if mesh is None else rules.named_sharding(mesh, axes),
        )

    def abstract_params(self, config: EngineConfig) -> nnx.State[Any, Any]:
        """Return shapes, dtypes and placement of the parameters, over all devices together."""
        _, params = self._abstract(self.split.whole, config, None)
        if self.mesh is None:
            return params
        placed: nnx.State[Any, Any] = jax.tree.map(_place, params, self.param_shardings(config))
        return placed

    def allocate_kv_cache(self, part: KVCacheSpec, num_blocks: int) -> KVCache:
        """Return a zeroed cache over all devices.

        Args:
          part: what a block holds on one of them.
          num_blocks: blocks in the pool.
        """
        return allocate_kv_cache(self._whole(part), num_blocks, self._cache_sharding())

    def abstract_kv_cache(self, part: KVCacheSpec, num_blocks: int) -> KVCache:
        """Return shapes, dtypes and placement of what `allocate_kv_cache` would."""
        shapes: KVCache = jax.eval_shape(lambda: allocate_kv_cache(self._whole(part), num_blocks))
        sharding = self._cache_sharding()
        if sharding is None:
            return shapes
        layers = tuple(_place(layer, sharding) for layer in shapes.layers)
        return KVCache(layers, shapes.token_ids)

    def memory(self) -> DeviceMemory:
        """Return the memory of the device that has the least of it."""
        here = set(jax.local_devices())
        devices = () if self.mesh is None else self.mesh.devices.flat
        # Of devices that are not here, `device_memory` knows what is compiled for.
        asked = [device for device in devices if device in here] or [None]
        return min(map(device_memory, asked), key=lambda memory: memory.free_bytes)

    def programs(self, source: ProgramSource) -> ProgramSource:
        """Return a source whose programs run on all devices."""
        return source if self.mesh is None else ShardedPrograms(self.mesh, source)

    def _abstract(
        self, model: ModelConfig, config: EngineConfig, groups: tuple[CacheGroup, ...] | None
    ) -> tuple[GraphDef, nnx.State[Any, Any]]:
        return abstract_model(
            model,
            dtype=config.dtype,
            attention_backend=config.attention_backend,
            cache_groups=groups,
            quantization=config.quantization,
            split_by=None if self.mesh is None else self.split.rules,
        )

    def _whole(self, part: KVCacheSpec) -> KVCacheSpec:
        return dataclasses.replace(part, num_kv_heads=self.split.whole.num_kv_heads)

    def _cache_sharding(self) -> NamedSharding | None:
        if self.mesh is None:
            return None
        return self.split.rules.named_sharding(self.mesh, KV_CACHE_AXES)


def split_of(config: EngineConfig, model: ModelConfig) -> TensorParallel:
    """Return the model's parts as the settings ask for them; no device is needed.

    Raises:
      ValueError: if the model cannot be split like this.
    """
    if not config.enable_expert_parallel:
        return TensorParallel(model, config.tensor_parallel_size)
    if model.experts is None:
        raise ValueError(
            f"enable_expert_parallel splits a mixture by experts, but {model.architecture} has no "
            "experts; leave it out."
        )
    if config.tensor_parallel_size == 1:
        raise ValueError(
            "enable_expert_parallel gives each device some of the experts, but "
            "tensor_parallel_size=1; raise it, or leave the other out."
        )
    rules = ShardingRules(experts=TENSOR_AXIS)
    return TensorParallel(model, config.tensor_parallel_size, rules)


def _place(shape: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)  # type: ignore[no-untyped-call]
