"""The hygiene that `conftest.py` and `pyproject.toml` promise: tools, shapes."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

from paged.models.rope import rope_cos_sin
from paged.models.rope_config import RopeConfig

TESTS = pathlib.Path(__file__).parent

SKIPS = """
import pytest

def test_runs():
    pass

def test_tool():
    pytest.skip("missing tool: nm")

@pytest.mark.skipif(True, reason="missing tool: objdump")
def test_mark():
    pass

def test_device():
    pytest.skip("no CUDA device")
"""
MODULE = "import pytest\npytest.importorskip('no_such_module', reason='missing tool: it')"


FAILS = {"1 passed", "1 failed", "1 skipped", "2 errors"}


@pytest.mark.parametrize(
    ("ci", "workers", "expected"),
    [(None, 0, {"1 passed", "4 skipped"}), ("true", 0, FAILS), ("true", 1, FAILS)],
)
def test_missing_tool_fails_only_in_ci(
    ci: str | None, workers: int, expected: set[str], tmp_path: pathlib.Path
):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    env |= {"CI": ci} if ci else {}
    env["PYTHONPATH"] = str(TESTS.parent)  # conftest.py imports paged
    # --rootdir: no pyproject.toml of the folders above applies.
    flags = ["-q", "--color=no", "--continue-on-collection-errors", f"--rootdir={tmp_path}"]
    plugins = ["-p", "no:asyncio", "-p", "no:aiohttp", "-p", "no:cacheprovider", f"-n{workers}"]
    command = [sys.executable, "-m", "pytest", *flags, *plugins, "-c", os.devnull, str(tmp_path)]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    summary = done.stdout.splitlines()[-1].rpartition(" in ")[0]
    assert set(summary.split(", ")) == expected, done.stdout
    if ci == "true":
        assert "missing tool: nm: .ci/run must install it" in done.stdout


def test_axis_annotations_are_checked_under_pytest():
    with pytest.raises(jaxtyping.TypeCheckError, match="num_tokens"):
        rope_cos_sin(jnp.zeros([3, 2], jnp.int32), RopeConfig("default", 1e4), 8)
