"""Makes the programs that `benchmarks.gpu.run` runs on a machine with a GPU; needs none itself.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m benchmarks.gpu.export --out gpu_programs [--families sm_80 sm_90 sm_100]

Needs the extra `aot`. A kernel's code is for one family of GPUs, so each has a folder of its own.
"""

import argparse
import contextlib
import pathlib
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from tqdm import tqdm

from benchmarks.gpu.attention_cases import (
    CHECKED,
    TIMED,
    WRITE_DTYPES,
    attend,
    attend_in_float32,
    checked_program,
    timed_program,
    write,
    write_program,
)
from benchmarks.gpu.programs import Program, program_file, write_manifest
from benchmarks.gpu.step_cases import STEPS, run_step, step_program
from paged import backends
from paged._version import __version__
from paged.gpu.aot import Target

# A GPU of each family, for the few things that programs take from it.
FAMILIES = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200"}

_TRITON = export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")

type Pending = tuple[Program, str, Callable[..., Any]]
"""A program, the name of its file, and its function."""


def save(
    folder: pathlib.Path, program: Program, name: str, function: Callable[..., Any], platform: str
) -> None:
    """Write a function of a program's inputs as StableHLO for a platform."""
    shapes = [jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype)) for each in program.inputs]
    exported = export.export(jax.jit(function), platforms=[platform], disabled_checks=[_TRITON])
    program_file(folder, name).write_bytes(exported(*shapes).serialize())


def gpu_programs(folder: pathlib.Path, only: str = "") -> Iterator[Pending]:
    """Yield all programs whose name holds `only`; their small arrays are written to the folder."""
    for name, batch in _named(CHECKED, only):
        program = checked_program(folder, name, batch)
        yield program, name, attend(batch, "triton", 1)
        yield program, f"{name}.reference", attend_in_float32(batch)
    for dtype in WRITE_DTYPES:
        program = write_program(folder, dtype)
        if only in program.name:
            yield program, program.name, write("triton")
            yield program, f"{program.name}.reference", write("xla")
    for name, timed in _named(TIMED, only):
        program = timed_program(folder, name, timed)
        yield program, name, attend(timed.batch, "triton", program.repeats)
    for name, step in _named(STEPS, only):
        yield step_program(folder, name, step), name, run_step(step, "triton")


def _named[T](cases: Mapping[str, T], only: str) -> Iterator[tuple[str, T]]:
    return ((name, case) for name, case in cases.items() if only in name)


def export_family(folder: pathlib.Path, family: str, only: str = "") -> None:
    """Write the programs of a family of GPUs, or those whose name holds `only`."""
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Program] = {}
    with (
        backends.compiling_for(Target(FAMILIES[family]).device),
        contextlib.closing(tqdm(desc=family, unit="program")) as bar,
    ):
        for program, name, function in gpu_programs(folder, only):
            save(folder, program, name, function, "cuda")
            done[program.name] = program
            bar.update()
    about = {"family": family, "paged": __version__, "jax": jax.__version__}
    write_manifest(folder, list(done.values()), {**about, "python": platform.python_version()})


def main() -> None:
    """Export what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--only", default="", metavar="TEXT", help="programs whose name holds it")
    args = parser.parse_args()
    for family in args.families:
        export_family(args.out / family, family, args.only)


if __name__ == "__main__":
    main()
