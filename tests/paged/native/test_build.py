"""The kernels are built once, whoever asks, and again when the file is not what was built."""

import pathlib
import subprocess
import sys

import pytest

from paged.native import build
from paged.native.build import BuildError, build_library

# Stands for a compiler: fast, counts its calls, and copies its source to what it is asked to write.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake 1.0"; exit; fi
echo call >> "{log}"
while [ "$1" != -o ]; do shift; done
sleep {delay}
echo library > "$2"
"""
NUM_SOURCES = len(list(build.SOURCES.glob("*.cc")))


@pytest.fixture
def compiler(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    """A path with nothing but a compiler that logs its calls; returns the log."""
    log = tmp_path / "calls"
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "c++"
    program.write_text(FAKE_COMPILER.format(log=log, delay=0.1))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


def num_calls(log: pathlib.Path) -> int:
    return len(log.read_text().splitlines())


def test_second_call_finds_the_library(compiler, tmp_path):
    path = build_library(tmp_path / "cache")
    assert path.read_text() == "library\n"
    assert build_library(tmp_path / "cache") == path
    assert num_calls(compiler) == NUM_SOURCES + 1


@pytest.mark.parametrize("content", [b"", b"not what was built"])
def test_damaged_library_is_built_again(compiler, tmp_path, content):
    path = build_library(tmp_path / "cache")
    path.write_bytes(content)
    assert build_library(tmp_path / "cache") == path
    assert path.read_text() == "library\n"


def test_two_processes_at_once_build_once(compiler, tmp_path):
    code = f"from paged.native.build import build_library; build_library({str(tmp_path / 'c')!r})"
    root = pathlib.Path(__file__).parents[3]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    assert num_calls(compiler) == NUM_SOURCES + 1


def test_nothing_but_the_library_is_left(compiler, tmp_path):
    path = build_library(tmp_path / "cache")
    names = {file.suffix for file in path.parent.iterdir()}
    assert names == {".so", ".sha256", ".lock"}


def test_other_compiler_and_other_sources_get_a_library_of_their_own(
    compiler, tmp_path, monkeypatch
):
    first = build_library(tmp_path / "cache")
    program = tmp_path / "bin" / "c++"
    program.write_text(program.read_text().replace("fake 1.0", "fake 1.1"))
    second = build_library(tmp_path / "cache")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cc").write_text("")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert len({first, second, build_library(tmp_path / "cache")}) == 3


def test_no_compiler_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler; install g\+\+"):
        build_library(tmp_path)


def test_compiler_that_fails_is_quoted(compiler, tmp_path):
    program = tmp_path / "bin" / "c++"
    program.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo v && exit\necho no header >&2; exit 1"
    )
    with pytest.raises(BuildError, match="failed: no header"):
        build_library(tmp_path / "cache")


def test_compiler_that_cannot_be_run_is_named(compiler, tmp_path):
    (tmp_path / "bin" / "c++").write_text("#!/no/such/interpreter\n")
    with pytest.raises(BuildError, match=r"c\+\+ cannot be run"):
        build_library(tmp_path / "cache")


def test_folder_that_cannot_be_used_is_named(compiler, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot be used .*; name a folder that can be written"):
        build_library(tmp_path / "file" / "cache")
