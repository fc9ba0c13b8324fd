"""Compile a JAX program for a named NVIDIA GPU on a machine without one, and look at the result.

XLA's CUDA plugin compiles from a description of the GPU; `targets/` has four. What can be read off
is exact where it is structure (which buffers are aliased, which copies and collectives there are,
what becomes one CUDA graph, what kernels take) and silent about time: autotuning needs the device,
so matrix products have default tilings here.

Needs the extra `aot`, and a process that computes on CPUs: JAX_PLATFORMS=cpu. Without the CUDA
libraries, JAX loads its plugin only with JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.
"""

import collections
import dataclasses
import importlib.resources
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged import backends
from paged.gpu.custom_calls import triton_kernels
from paged.gpu.mosaic_dump import dumping_to, mosaic_kernels
from paged.gpu.ptx import Kernel
from paged.gpu.traffic import array_bytes
from paged.gpu.traits import Gpu, describe

TARGETS = ("a100", "h100", "h200", "b200")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What became of a program.

    Attributes:
      target: name of the GPU.
      argument_bytes, output_bytes, alias_bytes, temp_bytes: device memory, of one device.
      copies: (bytes, line of HLO) of each copy in the optimised program, largest first.
      collectives: how often each kind occurs.
      kernels: the Triton kernels, then the Mosaic ones.
      operations: how often each kind of operation is dispatched by the host; a "kCommandBuffer" is
        a CUDA graph.
      hlo: the optimised program.
    """

    target: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    copies: Sequence[tuple[int, str]]
    collectives: Mapping[str, int]
    kernels: Sequence[Kernel]
    operations: Mapping[str, int]
    hlo: str = dataclasses.field(repr=False)

    @property
    def largest_copy_bytes(self) -> int:
        """Size of the largest array that is copied; 0 if none is."""
        return self.copies[0][0] if self.copies else 0

    def kernel(self, name: str) -> Kernel:
        """Return the one kernel of this name.

        Raises:
          LookupError: if there is not exactly one.
        """
        found = [kernel for kernel in self.kernels if kernel.name == name]
        if len(found) != 1:
            names = ", ".join(kernel.name for kernel in self.kernels) or "none"
            raise LookupError(f"{len(found)} kernels are called {name}; the program has: {names}.")
        return found[0]


class Target:
    """A GPU, or several, to compile for.

    Args:
      name: one of `TARGETS`.
      mesh: devices by axis name; None: one device.

    Raises:
      ValueError: if the name is unknown.
      RuntimeError: if JAX's CUDA plugin is not there.
    """

    def __init__(self, name: str, mesh: Mapping[str, int] | None = None) -> None:
        if name not in TARGETS:
            raise ValueError(f"target {name!r} is unknown; choose one of {', '.join(TARGETS)}.")
        mesh = mesh or {"x": 1}
        text = (importlib.resources.files("paged.gpu") / "targets" / f"{name}.txtpb").read_text()
        shape = tuple(mesh.values())
        try:
            topology = topologies.get_topology_desc(
                name, "cuda", target_config=text, topology=f"1x1x{np.prod(shape)}"
            )
        except NotImplementedError as error:
            raise RuntimeError(
                "JAX's CUDA plugin is missing or did not load: pip install 'paged[aot]', and set "
                "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where CUDA's libraries are missing"
            ) from error
        self.name = name
        self.mesh = Mesh(np.array(topology.devices).reshape(shape), tuple(mesh))
        per_core = re.search(r"shared_memory_per_core: (\d+)", text)
        per_block = re.search(r"shared_memory_per_block_optin: (\d+)", text)
        memory = re.search(r"device_memory_size: (\d+)", text)
        assert memory is not None, "every target says so"
        assert per_core is not None, "every target says so"
        assert per_block is not None, "every target says so"
        self.shared_bytes_per_multiprocessor = int(per_core[1])
        self.shared_bytes_per_program = int(per_block[1])
        self.memory_bytes = int(memory[1])

    @property
    def device(self) -> jax.Device:
        """The first device."""
        device: jax.Device = self.mesh.devices.flat[0]
        return device

    @property
    def gpu(self) -> Gpu:
        """What kernels know of it."""
        return describe(self.device)

    def struct(self, shape: Sequence[int], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        """Return an abstract array on the target; `axes` are the mesh axes of its dimensions."""
        spec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]
        struct: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(shape), dtype, sharding=NamedSharding(self.mesh, spec)
        )
        return struct

    def compile(self, jitted: Any, *args: Any, options: Mapping[str, Any] | None = None) -> Report:
        """Lower and compile a jitted function.

        Args:
          jitted: a result of `jax.jit`.
          *args: its arguments, pytrees of what `struct` returns.
          options: compiler options of XLA.
        """
        with backends.compiling_for(self.device), tempfile.TemporaryDirectory() as folder:
            mosaic_folder = pathlib.Path(folder) / "mosaic"
            with dumping_to(mosaic_folder):
                lowered = jitted.lower(*args)
                compiled = lowered.compile(
                    compiler_options={
                        "xla_gpu_autotune_level": 0,
                        "xla_dump_to": folder,
                        "xla_dump_hlo_as_text": True,
                        **(options or {}),
                    }
                )
            operations = _dispatched_operations(pathlib.Path(folder))
            kernels = [*triton_kernels(lowered.as_text()), *mosaic_kernels(mosaic_folder)]
        hlo, memory = compiled.as_text(), compiled.memory_analysis()
        copies, collectives = _copies_and_collectives(hlo)
        return Report(
            target=self.name,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            copies=copies,
            collectives=collectives,
            kernels=kernels,
            operations=operations,
            hlo=hlo,
        )


def _copies_and_collectives(hlo: str) -> tuple[list[tuple[int, str]], dict[str, int]]:
    copies: list[tuple[int, str]] = []
    collectives: collections.Counter[str] = collections.Counter()
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\(", line)
        if match is None:
            continue
        operation = match[2].removesuffix("-start")
        if operation == "copy":
            copies.append((max(array_bytes(match[1])), line.strip()))
        elif operation in COLLECTIVES:
            collectives[operation] += 1
    return sorted(copies, reverse=True), dict(collectives)


def _dispatched_operations(folder: pathlib.Path) -> dict[str, int]:
    """Return the kinds of operations in the sequence that XLA dumped to a folder."""
    # Written again only where a pass changed it.
    last = list(folder.glob("*.thunk_sequence_after_thunk_passes*"))
    files = last or list(folder.glob("*.thunk_sequence*"))
    counts: collections.Counter[str] = collections.Counter()
    for file in files:
        counts.update(re.findall(r"^\d+: (\w+)", file.read_text(), re.MULTILINE))
    return dict(counts)
