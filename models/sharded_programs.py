"""`ShardedPrograms`: the programs of a step, run by all devices of a mesh at once."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged.models.programs import Program, ProgramSource
from paged.sharding import replicated


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedPrograms:
    """A source whose programs run under `shard_map`: the function sees one device's slices.

    Which arrays are split says their own placement: arguments and outputs with a `NamedSharding`
    are cut along it, all others are whole on every device. What devices tell each other is in the
    function, and nothing is added (docs/decisions/0035).

    Attributes:
      mesh: the devices.
      source: makes the programs.
    """

    mesh: Mesh
    source: ProgramSource

    def make(self, program: Program) -> Any:
        """Return the compiled program."""
        function = jax.shard_map(
            program.function,
            mesh=self.mesh,
            in_specs=jax.tree.map(_spec, program.arguments),
            out_specs=jax.tree.map(_spec, program.outputs),
            # That outputs are equal everywhere follows from sums and gathers, not from the types:
            # kernels have none.
            check_vma=False,
        )
        arguments = jax.tree.map(self._placed, program.arguments)
        return self.source.make(
            dataclasses.replace(program, function=function, arguments=arguments)
        )

    def _placed(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding if _is_split(leaf) else replicated(self.mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _is_split(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _spec(leaf: Any) -> PartitionSpec:
    spec: PartitionSpec = leaf.sharding.spec if _is_split(leaf) else PartitionSpec()  # type: ignore[no-untyped-call]
    return spec
