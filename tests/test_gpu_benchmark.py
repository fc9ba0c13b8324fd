"""`benchmarks/gpu`: a dry run to its end, its arithmetic, and what it does when things go wrong."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export

from benchmarks.gpu.attention_cases import TIMED, Batch
from benchmarks.gpu.measure import Clock, Rates, Times
from benchmarks.gpu.programs import (
    Input,
    Program,
    make_inputs,
    program_file,
    read_manifest,
    write_manifest,
)
from benchmarks.gpu.report import Report, timed_row
from benchmarks.gpu.run import run_programs
from benchmarks.gpu.step_cases import STEPS, step_program
from tests.server.process import ROOT


def run_dry(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", "--dry", *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_ends_with_its_time_whatever_it_is_doing():
    run = run_dry("--seconds=0.1")
    assert run.returncode == 0, run.stderr
    assert "not run: the time is over" in run.stdout


def test_dry_run_comes_to_its_end(tmp_path):
    file = tmp_path / "gpu.json"
    run = run_dry(f"--json={file}")
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())["rows"]
    notes = {row["name"]: row["note"] for row in rows}
    assert {name for name, note in notes.items() if note == "right"} == {
        "check: mixed float32",
        "check: decode float16",
        "check: decode e4m3",
        *(f"check: write {dtype}" for dtype in ("float32", "float16", "float8_e4m3fn")),
    }
    timed = [row["name"] for row in rows if row["microseconds"] and row["figure"] > 0]
    assert timed == ["decode 64 x 8k", "tiny decode 2", "tiny prefill 32"]
    assert len(rows) == 9
    assert all(f"| {name} |" in run.stdout for name in notes)


X = (Input((4,), "float32"),)
RIGHT = Program("right", "check", X, tolerance=0.0)
WRONG = Program("wrong", "check", X, tolerance=0.5)
BROKEN = Program("broken", "check", X, tolerance=0.0)
NAN = Program("nan", "check", X, tolerance=1e9)


def load_fake(folder, program, *, reference=False):
    del folder
    if program is not None and program.name == "broken":
        raise RuntimeError("it does not compile\nat all")
    if reference:
        return lambda x: (x,)
    change = {"right": 0.0, "wrong": 1.0, "nan": float("nan")}[program.name]
    return lambda x: (x + jnp.float32(change),)


def notes_of(tmp_path, programs, seconds: float) -> list[str]:
    write_manifest(tmp_path, programs, {"family": "none"})
    report = Report({}, tmp_path / "report.json")
    run_programs(tmp_path, report, load_fake, Clock(seconds), is_dry=True)
    assert report.status == any(row.note == "WRONG" for row in report.rows)
    assert [row["note"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]] == [
        row.note for row in report.rows
    ]
    return [row.note for row in report.rows]


def test_failures_are_named_and_cost_the_others_nothing(tmp_path):
    notes = notes_of(tmp_path, [WRONG, BROKEN, NAN, RIGHT], seconds=60)
    assert notes == ["WRONG", "failed: RuntimeError: it does not compile", "WRONG", "right"]


def test_without_time_left_nothing_is_run(tmp_path):
    assert notes_of(tmp_path, [RIGHT], seconds=0) == ["not run: no time left"]


def test_records_and_arrays_survive_the_folder(tmp_path):
    program = step_program(tmp_path, "x", dataclasses.replace(STEPS["Qwen2.5-7B decode 1"]))
    write_manifest(tmp_path, [program], {"family": "sm_90"})
    assert read_manifest(tmp_path) == ([program], {"family": "sm_90"})
    poisoned = Program("p", "check", (Input((3, 2), "bfloat16", scale=0.0, is_poisoned=True),))
    (array,) = make_inputs(tmp_path, poisoned)
    assert jnp.isnan(array).tolist() == [[True, True], [False, False], [False, False]]


def test_figures_follow_from_bytes_flops_and_times():
    report = Report({}, None)
    report.rates = Rates(copy=4e12, product=800e12)
    base = Program("a", "attention", (), read_bytes=3e9, flops=4e11, first=60, goal=80)
    times = Times(1e-3, 0.9e-3, 2e-3)
    figures = {
        unit: timed_row(dataclasses.replace(base, unit=unit), times, report)
        for unit in ("TB/s", "TFLOP/s", "% of copy", "% of floor", "% of product")
    }
    assert [row.figure for row in figures.values()] == pytest.approx([3, 400, 75, 75, 50])
    assert [row.note for row in figures.values()] == ["short", "goal", "first", "first", "short"]
    report.add(figures["TB/s"])
    whole = dataclasses.replace(base, name="whole", unit="% of parts", parts=("a", "a"))
    assert timed_row(whole, times, report).figure == pytest.approx(200)
    missing = dataclasses.replace(whole, parts=("a", "b"))
    assert timed_row(missing, times, report).figure is None
    assert "| a | 1000.0 (900.0 to 2000.0) | 3 | 400 | 3 TB/s | 60 | 80 | short |" in str(report)


def test_bytes_and_flops_are_those_of_the_definition():
    batch = Batch(((40, 3), (7, 7), (9, 1)), kv_heads=2, group=3, head_dim=64)
    seen = sum(
        position + 1
        for context, query in batch.seqs
        for position in range(context - query, context)
    )
    assert batch.flops == seen * 6 * 64 * 4
    assert batch.kv_bytes == (40 + 7 + 9) * 2 * 2 * 64 * 2
    # 64 x 8k: what 3.2 TB/s are measured on.
    assert TIMED["decode 64 x 8k"].batch.kv_bytes == 64 * 8192 * 2 * 8 * 128 * 2


def test_steps_read_weights_and_contexts(tmp_path):
    program = step_program(tmp_path, "x", STEPS["Llama-3-8B decode 64"])
    # 8.03e9 parameters, of which 128,256 x 4,096 are only looked up; 131,072 bytes a token.
    parameters = 8_030_261_248 - 128_256 * 4096
    assert program.read_bytes == 2 * parameters + 64 * 2048 * 131_072
    attention = 4 * 64 * 2048 * 32 * 32 * 128
    assert program.flops == pytest.approx(2 * 64 * parameters + attention, rel=1e-3)


@pytest.mark.aot
def test_exported_programs_hold_their_kernels(tmp_path):
    from benchmarks.gpu.export import export_family
    from paged.gpu.aot import Target

    export_family(tmp_path, "sm_90", only="decode 1 x 32k")
    ((program,), about) = read_manifest(tmp_path)
    assert about["family"] == "sm_90"
    exported = export.deserialize(bytearray(program_file(tmp_path, program.name).read_bytes()))
    gpu = Target("h200")
    arrays = [gpu.struct(each.shape, each.dtype) for each in program.inputs]
    report = gpu.compile(jax.jit(exported.call, donate_argnums=program.donated), *arrays)
    # Eight layers of attention in one graph, all of the same two kernels.
    assert [kernel.name for kernel in report.kernels] == ["attention_kernel", "combine_kernel"]
    assert report.hlo.count('custom_call_target="triton_kernel_call_ffi"') == 8 * 2
    assert report.operations == {"kCommandBuffer": 1}
