"""`benchmarks/metrics_cost.py`: its columns agree with each other."""

import json
import subprocess
import sys

import pytest

from tests.server.process import ROOT


def test_cost_per_token_and_share_follow_from_the_cost_of_a_step(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.metrics_cost", f"--json={file}"]
    run = subprocess.run(
        [*command, "--num-seqs", "4", "--num-steps", "20"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(file.read_text())
    row = result["steps"]["4"]
    both = row["collect"] + row["observe"]
    assert row["per token"] == pytest.approx(both / 4)
    assert row["of the step"] == pytest.approx(both / row["host step"])
    assert row["2% of ms"] == pytest.approx(both / 20)
    assert set(result["requests"]) == {"finish", "trace", "http"}
    assert all(name in run.stdout for name in row)
