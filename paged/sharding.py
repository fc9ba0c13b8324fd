"""`ShardingRules`: which mesh axis each logical axis of an array is split over.

Models and caches name the axes of their arrays ("vocab", "q_heads", ...); this file alone turns
the names into JAX shardings. It knows no model and no array.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tp"
"""Mesh axis of tensor parallelism."""

KV_CACHE_AXES = (None, None, "kv_heads", None, "head_dim")
"""Logical axes of one layer's cache, `[num_blocks, planes, num_kv_heads, block_size, head_dim]`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingRules:
    """Logical axis -> mesh axis, or None for an axis that is not split.

    The defaults are Megatron's: heads, MLP features and vocabulary are split over "tp", and the
    residual stream is replicated.

    Attributes:
      vocab: entries of the vocabulary.
      q_heads, kv_heads: attention heads.
      mlp: intermediate features of the MLP.
      experts: experts of a mixture. Where they are split, each is whole on its device: the "mlp"
        axis of the same array is not split then.
      embed: features of the residual stream.
      head_dim: features of one head.
      latent: features of a vector that all heads are made of.
      layers: stacked layers.

    Source: Megatron-LM, arXiv:1909.08053; the form of the rules, jax-llm-examples.
    """

    vocab: str | None = TENSOR_AXIS
    q_heads: str | None = TENSOR_AXIS
    kv_heads: str | None = TENSOR_AXIS
    mlp: str | None = TENSOR_AXIS
    experts: str | None = None
    embed: str | None = None
    head_dim: str | None = None
    latent: str | None = None
    layers: str | None = None

    def partition_spec(self, logical_axes: Sequence[str | None]) -> PartitionSpec:
        """Return the partition of an array whose axes have these names; None is never split.

        Raises:
          ValueError: if a name has no rule, or if two axes would use the same mesh axis.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in logical_axes:
            if name is not None and name not in known:
                raise ValueError(f"logical axis {name!r} has no rule; the rules are {known}.")
        mesh_axes = [None if name is None else getattr(self, name) for name in logical_axes]
        if "experts" in logical_axes and self.experts is not None:
            mesh_axes = [
                None if name == "mlp" else axis
                for name, axis in zip(logical_axes, mesh_axes, strict=True)
            ]
        used = [axis for axis in mesh_axes if axis is not None]
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(
                    f"logical_axes={tuple(logical_axes)} use mesh axis {axis!r} "
                    f"{used.count(axis)} times; map all but one of them to None."
                )
        return PartitionSpec(*mesh_axes)  # type: ignore[no-untyped-call]

    def named_sharding(self, mesh: Mesh, logical_axes: Sequence[str | None]) -> NamedSharding:
        """Return the placement on `mesh` of an array whose axes have these names.

        Raises:
          ValueError: as `partition_spec`, or if the mesh lacks an axis that the rules ask for.
        """
        spec = self.partition_spec(logical_axes)
        for axis in spec:
            if axis is not None and axis not in mesh.axis_names:
                raise ValueError(
                    f"mesh axis {axis!r} is not in mesh.axis_names={mesh.axis_names}; "
                    "make the mesh with it (see tensor_parallel_mesh) or map the rule to None."
                )
        return NamedSharding(mesh, spec)

    def kv_cache_spec(self) -> PartitionSpec:
        """Return the partition of one layer's KV cache: by kv heads."""
        return self.partition_spec(KV_CACHE_AXES)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the placement of an array that every device of `mesh` holds whole."""
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def tensor_parallel_mesh(num_devices: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of `num_devices` devices along the tensor axis.

    Args:
      num_devices: size of the axis, at least 1.
      devices: the devices to choose from, the first ones are taken; None is all of JAX's.

    Raises:
      ValueError: if there are fewer devices than asked for.
    """
    available = jax.devices() if devices is None else list(devices)
    if not 1 <= num_devices <= len(available):
        raise ValueError(
            f"num_devices={num_devices} must be between 1 and the {len(available)} "
            f"{available[0].platform} devices that are present; to try more on a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(num_devices, 2)}."
        )
    return jax.make_mesh(
        (num_devices,),
        (TENSOR_AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=available[:num_devices],
    )
