"""Logical axis names to mesh axes: every `PartitionSpec` of the project is made here."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tp"
"""Mesh axis over which heads, MLP features and the vocabulary are split."""


@dataclass(frozen=True, slots=True)
class ShardingRules:
    """Which mesh axis splits each logical axis; None leaves it whole on every device.

    Parameters and cache arrays name their axes; this table is all that a change of sharding
    touches.

    Attributes:
      vocab: rows of the embedding and of the head.
      q_heads, kv_heads: attention heads.
      mlp: features between the projections of an MLP.
      embed: features of the residual stream.
      head_dim: features of one head.
    """

    vocab: str | None = TENSOR_AXIS
    q_heads: str | None = TENSOR_AXIS
    kv_heads: str | None = TENSOR_AXIS
    mlp: str | None = TENSOR_AXIS
    embed: str | None = None
    head_dim: str | None = None

    def partition_spec(self, logical_axes: Sequence[str | None]) -> PartitionSpec:
        """Return the spec of an array whose axes have these logical names (None: unnamed, whole).

        Raises:
          ValueError: for an unknown name, or if one mesh axis would split two axes of the array.
        """
        known = {field.name for field in fields(self)}
        mesh_axes: list[str | None] = []
        for name in logical_axes:
            if name is not None and name not in known:
                raise ValueError(
                    f"logical axis {name!r} is unknown; choose one of {', '.join(sorted(known))}."
                )
            mesh_axes.append(None if name is None else getattr(self, name))
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise ValueError(
                f"axes {tuple(logical_axes)} map to {tuple(mesh_axes)}: one mesh axis cannot split "
                "two axes of an array."
            )
        return PartitionSpec(*mesh_axes)

    def named_sharding(self, mesh: Mesh, logical_axes: Sequence[str | None]) -> NamedSharding:
        """Return where an array with these logical axes lies on `mesh`."""
        return NamedSharding(mesh, self.partition_spec(logical_axes))

    def kv_cache_sharding(self, mesh: Mesh) -> NamedSharding:
        """Return where one layer's cache lies: split by kv heads."""
        return self.named_sharding(mesh, (None, None, "kv_heads", None, "head_dim"))


def make_mesh(num_devices: int) -> Mesh:
    """Return a mesh of the first `num_devices` devices along the tensor axis.

    Raises:
      ValueError: if there are not as many devices.
    """
    devices = jax.devices()
    if not 1 <= num_devices <= len(devices):
        raise ValueError(f"num_devices={num_devices} must be in [1, {len(devices)}].")
    return Mesh(np.array(devices[:num_devices]), (TENSOR_AXIS,))
