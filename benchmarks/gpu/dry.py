"""The programs of a run without a GPU: tiny, kernels in Triton's interpreter, steps by XLA."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.attention_cases import (
    TINY_CHECKED,
    TINY_TIMED,
    WRITE_DTYPES,
    Batch,
    attend_in_float32,
    checked_program,
    options_of,
    timed_program,
    write,
    write_program,
)
from benchmarks.gpu.export import save
from benchmarks.gpu.programs import Program, load, write_manifest
from benchmarks.gpu.step_cases import TINY_STEPS, run_step, step_program
from paged.gpu.interpreter import interpret
from paged.gpu.traits import Gpu
from paged.triton.attention import attend_with
from paged.triton.kv_write import write_kv_with
from paged.triton.plan import make_plan

# The one kind of GPU that decodes float8 by bit operations, as the interpreter must.
_GPU = Gpu(compute_capability=80, num_multiprocessors=108)


def make_dry_programs(folder: pathlib.Path) -> Callable[..., Any]:
    """Write tiny programs to a folder and return what loads them, as `programs.load`."""
    interpreted: dict[str, Callable[..., Any]] = {}
    programs: list[Program] = []
    for name, batch in TINY_CHECKED.items():
        programs.append(checked_program(folder, name, batch))
        interpreted[name] = _attend(batch, 1)
        save(folder, programs[-1], f"{name}.reference", attend_in_float32(batch), "cpu")
    for dtype in WRITE_DTYPES:
        if dtype == "bfloat16":
            continue  # the interpreter cannot read it
        programs.append(write_program(folder, dtype))
        interpreted[programs[-1].name] = _write
        save(folder, programs[-1], f"{programs[-1].name}.reference", write("xla"), "cpu")
    for name, timed in TINY_TIMED.items():
        programs.append(timed_program(folder, name, timed))
        interpreted[name] = _attend(timed.batch, programs[-1].repeats)
    for name, step in TINY_STEPS.items():
        programs.append(step_program(folder, name, step))
        save(folder, programs[-1], name, run_step(step, "xla"), "cpu")
    write_manifest(folder, programs, {"family": "none: kernels are interpreted"})

    def load_dry(folder: pathlib.Path, program: Program, *, reference: bool = False) -> Any:
        if not reference and program.name in interpreted:
            return interpreted[program.name]
        return load(folder, program, reference=reference)

    return load_dry


def _attend(batch: Batch, repeats: int) -> Callable[..., Any]:
    make = jax.jit(
        functools.partial(
            make_plan,
            num_tokens=batch.num_tokens,
            group=batch.group,
            block_size=batch.block_size,
            sliding_window=batch.sliding_window,
            wanted_items=6,
        )
    )

    def run(q: Any, cache: Any, tables: Any, seq_lens: Any, starts: Any, *extras: Any) -> Any:
        plan = make(tables, seq_lens, starts)
        options = options_of(batch, *extras) | {"scale": batch.head_dim**-0.5}
        for _ in range(repeats):
            q = attend_with(interpret, _GPU, q, cache, plan, **options)
        return (jnp.asarray(q),)

    return run


def _write(cache: Any, k: Any, v: Any, slots: Any) -> Any:
    return (jnp.asarray(write_kv_with(interpret, cache, k, v, slots, None)),)
