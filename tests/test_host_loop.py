"""`benchmarks/host_loop.py`, `http_streaming.py`: parts make up their step; streams are read."""

import json
import subprocess
import sys

import pytest

from tests.server.process import ROOT


def test_parts_of_the_host_loop_make_up_its_step(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "host_loop.py"), f"--json={file}"]
    run = subprocess.run(
        [*command, "--num-seqs", "1", "4", "--num-steps", "20"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())
    assert list(rows) == [
        *(f"{n}, {consumers}" for n in (1, 4) for consumers in ("whole", "streaming")),
        "63 + 512 prompt tokens, streaming",
    ]
    parts = ("schedule", "build", "execute", "update", "outputs", "rest")
    for name, num_seqs in zip(rows, (1, 1, 4, 4, 64), strict=True):
        row = rows[name]
        assert all(row[part] > 0 for part in parts[:-1])
        # "rest" is what the others leave, and never negative.
        assert sum(row[part] for part in parts) >= row["step"] * (1 - 1e-9)
        assert row["loop"] == pytest.approx(row["step"] + row.get("hand-over", 0))
        assert row["per token"] * num_seqs == pytest.approx(row["loop"])
    assert all(name in run.stdout for name in rows)


def test_every_stream_is_read_to_its_end(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.http_streaming", f"--json={file}"]
    run = subprocess.run(
        [*command, "--num-seqs", "2", "--num-steps", "10"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(file.read_text()).values()
    # A pass through JSON and a socket takes some microseconds on any machine.
    assert all(row[kind] > 1 for kind in ("completions", "chat"))
