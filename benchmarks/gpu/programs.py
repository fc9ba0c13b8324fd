"""What `benchmarks/gpu` runs: programs as records, which a folder carries to a machine with a GPU.

A program is a function of arrays in StableHLO, as `jax.export` keeps it. Its record says what to
call it with and what it reads and computes, so that whoever runs it needs JAX and nothing of ours:
no Triton either, as a kernel's code lies in its program.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

MANIFEST = "programs.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """One array to call a program with.

    Attributes:
      shape, dtype: of the array.
      fill: "normal" (times `scale`), "zeros", "ones", or the name of a `.npy` file with its values.
      scale: standard deviation of random values.
      is_poisoned: the first row, the null block, holds NaN; whoever reads it is found out.
    """

    shape: tuple[int, ...]
    dtype: str
    fill: str = "normal"
    scale: float = 1.0
    is_poisoned: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program and what is known about it.

    Attributes:
      name: what the report calls it; also the stem of its file.
      part: "check", "attention" or "step".
      inputs: what it is called with.
      carry: (output, input) pairs: what a call returns takes the place of an input, donated, in
        the next one.
      repeats: how often the program does the same thing in one call.
      read_bytes, flops: of one of these; what must be read, and what must be multiplied (causal
        halves counted as such).
      unit, first, goal: what its figure is, and what it should be (`paged/gpu` targets).
      parts: names of programs whose times together are compared with this one's.
      tolerance: of a check: how far outputs may be from those of `NAME.reference`.
    """

    name: str
    part: str
    inputs: tuple[Input, ...]
    carry: tuple[tuple[int, int], ...] = ()
    repeats: int = 1
    read_bytes: float = 0
    flops: float = 0
    unit: str = ""
    first: float | None = None
    goal: float | None = None
    parts: tuple[str, ...] = ()
    tolerance: float | None = None

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of the inputs that a call uses up."""
        return tuple(index for _, index in self.carry)


def write_manifest(folder: pathlib.Path, programs: Sequence[Program], about: Any) -> None:
    """Write the records of all programs of a folder."""
    records = [dataclasses.asdict(program) for program in programs]
    text = json.dumps({"about": about, "programs": records}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")


def read_manifest(folder: pathlib.Path) -> tuple[list[Program], Any]:
    """Return the records of a folder, and what is said about all of them.

    Raises:
      FileNotFoundError: if it holds none.
    """
    content = json.loads((folder / MANIFEST).read_text())
    programs = []
    for record in content["programs"]:
        inputs = tuple(
            Input(**{**each, "shape": tuple(each["shape"])}) for each in record.pop("inputs")
        )
        carry = tuple(tuple(pair) for pair in record.pop("carry"))
        parts = tuple(record.pop("parts"))
        programs.append(Program(inputs=inputs, carry=carry, parts=parts, **record))
    return programs, content["about"]


def program_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return where the program of this name lies."""
    return folder / f"{name.replace(' ', '_')}.stablehlo"


def load(folder: pathlib.Path, program: Program, *, reference: bool = False) -> Any:
    """Return the compiled program, or its reference, as a function of its inputs."""
    name = f"{program.name}.reference" if reference else program.name
    exported = export.deserialize(bytearray(program_file(folder, name).read_bytes()))
    shapes = [jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype)) for each in program.inputs]
    donated = () if reference else program.donated
    return jax.jit(exported.call, donate_argnums=donated).lower(*shapes).compile()


def make_inputs(folder: pathlib.Path, program: Program) -> list[jax.Array]:
    """Return the arrays of a program; the same for its reference."""
    values = jax.random.normal(jax.random.key(0), (_NUM_VALUES,), jnp.bfloat16)
    return [_fill(folder, each, values, i) for i, each in enumerate(program.inputs)]


# Random numbers that are repeated; prime, so that no two rows of an array are alike.
_NUM_VALUES = 1_000_003


def _fill(folder: pathlib.Path, wanted: Input, values: jax.Array, index: int) -> jax.Array:
    dtype = jnp.dtype(wanted.dtype)
    if wanted.fill in ("zeros", "ones"):
        return jnp.full(wanted.shape, int(wanted.fill == "ones"), dtype)
    if wanted.fill != "normal":
        return jnp.asarray(np.load(folder / wanted.fill))
    start = jnp.int32(7919 * index)
    return _normal(values, start, wanted.scale, wanted.shape, dtype, wanted.is_poisoned)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _normal(
    values: jax.Array,
    start: jax.Array,
    scale: float,
    shape: tuple[int, ...],
    dtype: Any,
    is_poisoned: bool,
) -> jax.Array:
    values = jnp.roll(values, start) * jnp.asarray(scale, values.dtype)
    array = jnp.resize(values.astype(dtype), shape)
    return array.at[0].set(jnp.nan) if is_poisoned else array
