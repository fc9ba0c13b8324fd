"""Checks and times the kernels and whole steps on a GPU; prints one table, writes JSON.

    python -m benchmarks.gpu.run --programs gpu_programs --json gpu.json
    python -m benchmarks.gpu.run --dry

`benchmarks.gpu.export` makes the programs. Here nothing is needed but JAX (with `flatbuffers`) and
NumPy; with torch its attention is timed, too. Kernels are compared with the XLA reference first.
Each part has a share of the time; a run ends with what it has when its time is over. `--dry` goes
the same way on a CPU with tiny shapes, kernels in Triton's interpreter; its times mean nothing.
"""

import argparse
import gc
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.measure import Clock, measure_rates, time_program
from benchmarks.gpu.programs import MANIFEST, Program, load, make_inputs, read_manifest
from benchmarks.gpu.report import Report, Row, check_row, timed_row

# Of the time that is left, what each part may take; the last rest is for torch.
_SHARES = {"check": 0.3, "attention": 0.4, "step": 0.85}


def main() -> int:
    """Run what the command line asks for; 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=pathlib.Path, metavar="DIR", help="of the export")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=460.0, help="time for all of it")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args()
    report = Report({"device": str(jax.devices()[0]), "jax": jax.__version__}, args.json)
    # A compilation cannot be interrupted, so what there is by then is printed around it.
    watchdog = threading.Timer(args.seconds, _end, [report, "the time is over"])
    watchdog.daemon = True
    watchdog.start()
    if args.dry:
        # Only here: this needs the whole package, and Triton.
        from benchmarks.gpu.dry import make_dry_programs

        with tempfile.TemporaryDirectory() as name:
            loader = make_dry_programs(pathlib.Path(name))
            run_programs(pathlib.Path(name), report, loader, Clock(args.seconds), is_dry=True)
    else:
        folder = _family_folder(parser, args.programs)
        run_programs(folder, report, load, Clock(args.seconds - 15), is_dry=False)
    watchdog.cancel()
    print(report)
    return report.status


def run_programs(
    folder: pathlib.Path,
    report: Report,
    loader: Callable[..., Any],
    clock: Clock,
    *,
    is_dry: bool,
) -> None:
    """Run the programs of a folder, part by part, into a report."""
    programs, about = read_manifest(folder)
    report.about |= about
    report.rates = measure_rates(is_dry=is_dry)
    for part, share in _SHARES.items():
        part_clock = Clock(share * clock.left)
        for program in programs:
            if program.part != part:
                continue
            if part_clock.left <= 0:
                report.add(Row(program.name, note="not run: no time left"))
                continue
            try:
                report.add(_run(folder, program, loader, report, is_dry=is_dry))
            except Exception as error:  # one that fails must not cost the others
                report.add(Row(program.name, note=f"failed: {_first_line(error)}"))
            gc.collect()
    if not is_dry:
        _time_torch(report, clock)
    report.write()


def _run(
    folder: pathlib.Path,
    program: Program,
    loader: Callable[..., Any],
    report: Report,
    *,
    is_dry: bool,
) -> Row:
    compiled = loader(folder, program)
    inputs = make_inputs(folder, program)
    if program.tolerance is not None:
        expected = loader(folder, program, reference=True)(*inputs)
        return check_row(program, _largest_error(compiled(*inputs), expected))
    times = time_program(
        compiled,
        program,
        inputs,
        seconds=0.01 if is_dry else 1.5,
        calls=1 if is_dry else 10,
    )
    return timed_row(program, times, report)


def _largest_error(outputs: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """Return the largest difference; where it is no number, infinity."""
    differences = [
        jnp.abs(output.astype(jnp.float32) - wanted.astype(jnp.float32))
        for output, wanted in zip(outputs, expected, strict=True)
    ]
    largest = max(float(jnp.max(each)) for each in differences)
    return largest if largest == largest else float("inf")


def _time_torch(report: Report, clock: Clock) -> None:
    if importlib.util.find_spec("torch") is None or clock.left < 20:
        report.add(Row("torch", note="not run: no torch, or no time left"))
        return
    command = [sys.executable, "-m", "benchmarks.gpu.torch_attention"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=clock.left)
        results = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        report.add(Row("torch", note=f"failed: {_first_line(error)}"))
        return
    for name, times in results.items():
        ours = report.seconds_of(name)
        figure = None if ours is None else times[0] / (ours * 1e6)
        report.add(Row(f"torch: {name}", tuple(times), figure=figure, unit="times ours"))


def _family_folder(parser: argparse.ArgumentParser, folder: pathlib.Path | None) -> pathlib.Path:
    """Return the folder with the programs of this GPU."""
    if folder is None:
        parser.error("--programs DIR, from benchmarks.gpu.export, or --dry")
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None:
        parser.error("no GPU is here; --dry runs on a CPU")
    family = f"sm_{capability.replace('.', '')}"
    if not (folder / family / MANIFEST).exists():
        parser.error(f"{folder} has no programs for {family}: benchmarks.gpu.export makes them")
    return folder / family


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _end(report: Report, reason: str) -> None:
    """Print what there is and end the process, whatever it is doing."""
    report.add(Row("the rest", note=f"not run: {reason}"))
    print(report, flush=True)
    os._exit(report.status)


if __name__ == "__main__":
    sys.exit(main())
