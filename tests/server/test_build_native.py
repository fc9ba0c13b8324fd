"""`paged build-native`: a library that works, or the reason why there is none."""

import ctypes
import pathlib
import subprocess
import sys

import pytest

from paged.native.library import LEVELS
from paged.scheduler.config import DEFAULT_NATIVE_CACHE_DIR
from paged.server.cli import main
from tests.server.process import ROOT


def paged(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as libraries stay loaded in this one."""
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": path or "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-m", "paged.server.cli", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_kernels_are_tested_and_found_again(native):
    # Where they are, as building takes a minute; paged/native/test_build.py builds from nothing.
    folder = pathlib.Path(DEFAULT_NATIVE_CACHE_DIR).expanduser()
    libraries = set(folder.glob("*.so"))
    done = paged("build-native", "--native-cache-dir", str(folder))
    assert done.returncode == 0, done.stderr
    assert f"Building the native CPU kernels in {folder}" in done.stderr
    path, level = done.stdout.splitlines()
    assert level.removeprefix("instructions: ") in LEVELS
    assert ctypes.CDLL(path).paged_best_level() == LEVELS.index(level.split()[-1])
    assert pathlib.Path(path) in libraries == set(folder.glob("*.so"))


@pytest.mark.slow
def test_kernels_are_built_where_there_are_none(tmp_path):
    done = paged("build-native", "--native-cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    path, _ = done.stdout.splitlines()
    assert [str(file) for file in tmp_path.glob("*.so")] == [path]


def test_without_a_compiler_the_reason_and_the_remedy_are_said(tmp_path):
    done = paged("build-native", "--native-cache-dir", str(tmp_path), path=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "paged: error: the native CPU kernels cannot be built: there is no C++ compiler; install "
        "g++ (Debian: apt-get install g++)."
    )


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, capsys):
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\necho cannot do that >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["build-native", "--native-cache-dir", str(tmp_path / "cache")]) == 1
    assert "cannot be built: " in (error := capsys.readouterr().err)
    assert "cannot do that" in error
